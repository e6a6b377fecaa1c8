"""Requests of the cells: the run that each cell needs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from memcalc import __version__
from memcalc.cells.cell import CellResult, GridCell, check_size, points
from memcalc.errors import InputError
from memcalc.files import MOST_CONFIG_BYTES, is_file, read_bytes
from memcalc.nullcuda.gpu_description import find_null_gpu
from memcalc.nullcuda.interpreters import interpreters
from memcalc.nullcuda.torch_build import find_torch
from memcalc.nullcuda.tracing import interpreter
from memcalc.spec.spec import Spec
from memcalc.sweeping.grid import Grid, Value, assignments, written

GPU = "gpu"  # the name that varies the GPU of a dry run

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


def traced_cells(
    by: str, grid: Grid, load: Callable[[tuple[str, ...]], Spec], steps: int, python: str | None = None
) -> list[GridCell]:
    """Return the cells of a grid of configurations.

    Args:
        by: "trace": on fake tensors; "null": on the null device.
        grid: the configurations.
        load: loads a configuration from its assignments.
        steps: optimizer steps of each run.
        python: for "null", the interpreter with a CUDA build of torch.

    Raises:
        InputError: all configurations are invalid; the message is that of the first.
        Unavailable: there is no CUDA build of torch.
    """
    check_size(grid.size)
    python = interpreter(python) if by == "null" else None
    versions = {"memcalc": __version__, "torch": _version("torch"), "transformers": _version("transformers")}
    if python is not None:
        versions["torch"] = find_torch([python]).version
    found = []
    for number in range(grid.size):
        values = grid.point(number)
        names = {name.rpartition(".")[2]: value for name, value in values.items()}
        request: dict[str, Any] = {"by": by, "steps": steps, "python": python, "versions": versions}
        try:
            spec = load(assignments(values))
        except InputError as error:
            invalid = request | {"values": [*assignments(values)]}
            found.append(GridCell(names, invalid, CellResult("invalid", reason=str(error))))
        else:
            found.append(GridCell(names, request | {"spec": spec.model_dump(mode="json")}))
    if all(cell.answer is not None for cell in found):
        first = found[0].answer
        assert first is not None
        several = f"none of {len(found):,} configurations is valid; the first: " if len(found) > 1 else ""
        raise InputError(several + first.reason)
    return found


def command_cells(
    command: Sequence[str],
    axes: Mapping[str, Sequence[Value]],
    gpu: str | None,
    *,
    gpus: int = 1,
    timeout: float | None = None,
    options: Mapping[str, Any],
) -> list[GridCell]:
    """Return the cells of a command that contains {name} for each varied name.

    Args:
        command: the program and its arguments.
        axes: the values of each name; "gpu" varies the GPU of the dry run.
        gpu: as for a dry run; None: it is varied.
        gpus: as for a dry run.
        timeout: seconds for each run.
        options: see `memcalc.nullcuda.options.Options`.

    Raises:
        InputError: the command lacks a varied name, the GPU is unknown, or the command does not exist.
        Unavailable: there is no CUDA build of torch.
    """
    text = "\0".join(command)
    for name in axes:
        if _NAME.fullmatch(name) is None:
            raise InputError(
                f"{name!r} is not a name.", "Write --vary batch=1,2,4 and {batch} in the command.", "--vary"
            )
        if name != GPU and f"{{{name}}}" not in text:
            raise InputError(
                f"{name} is varied, but {{{name}}} is not in the command.",
                f"Write {{{name}}} where its value belongs, e.g. --batch-size {{{name}}}.",
                "--vary",
            )
    if gpu is None and GPU not in axes:
        raise InputError("a dry run needs a GPU.", "Name one: --gpu h100-80gb, or vary it: --vary gpu=...", "--gpu")
    found = []
    versions = {"memcalc": __version__, "torch": find_torch(interpreters(tuple(command))).version}
    content = cache(_content)  # cached for this sweep only: a file may change before the next
    for values in points(axes):
        words = [_filled(word, values) for word in command]
        gpu_spec = find_null_gpu(str(values.get(GPU, gpu))).name
        request = {
            "by": "dry-run",
            "command": words,
            "gpu": gpu_spec,
            "gpus": gpus,
            "timeout": timeout,
            "options": dict(options),
            "directory": str(Path.cwd()),
            "versions": versions,
            # A changed script is a different program, so its answers are not reused.
            "files": {word: content(word) for word in words if is_file(word)},
        }
        found.append(GridCell(values, request))
    return found


def _filled(word: str, values: Mapping[str, Value]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", written(value))
    return word


def _content(path: str) -> str:
    """Return an identifier of a file's content: its hash; for a file as large as weights, its size and time."""
    about = Path(path).stat()
    if about.st_size > MOST_CONFIG_BYTES:
        return f"{about.st_size} bytes of {about.st_mtime_ns}"
    return hashlib.sha256(read_bytes(path)).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
