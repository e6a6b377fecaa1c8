"""Runs of the cells of a grid that have no answer yet; each answer is stored as it arrives."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args

from memcalc.cells.cell import By, CellResult, GridCell, GridCells, Outcome, Request
from memcalc.errors import InputError, NotWritten
from memcalc.json_lines import JsonLines
from memcalc.text import message_part

Told = Callable[[GridCell | None, int, int], None]  # a finished cell, the number of finished cells, the number of cells


def run_cells(
    name: str,
    cells: Sequence[GridCell],
    file: Path,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    tell: Told = lambda *_: None,
) -> GridCells:
    """Run the cells that the file has no answer for.

    Args:
        name: name of the swept run.
        cells: cells of the grid; those with an answer are not run.
        file: file of answers, of earlier sweeps and of this one.
        workers: number of processes at a time; None: one per processor core that this process may use.
        scheduler: address of a Dask cluster; None: run the cells locally.
        tell: called first with None and the number of cells that need no run, then for each finished cell.

    Raises:
        InputError: the file has other content, or cannot be written.
        Unavailable: a requirement of every cell is missing.
    """
    kept = ResultFile(file)
    found = [cell if cell.answer is not None else replace(cell, answer=kept.find(cell)) for cell in cells]
    used = sum(cell.answer is not None and not before.answer for cell, before in zip(found, cells, strict=True))
    waiting = [number for number, cell in enumerate(found) if cell.answer is None]
    done = len(found) - len(waiting)
    unkept: NotWritten | None = None
    tell(None, done, len(found))
    with closing(_run([found[number].request for number in waiting], workers, scheduler)) as answers:
        for number, answer in answers:
            found[waiting[number]] = cell = replace(found[waiting[number]], answer=answer)
            try:
                kept.add(cell, answer)
            except NotWritten as error:
                unkept = error
                break
            done += 1
            tell(cell, done, len(found))
    fields = tuple(found[0].values) if found else ()
    by: By = found[0].request["by"] if found else "trace"
    answered = tuple(cell for cell in found if cell.answer is not None)
    return GridCells(name, by, fields, answered, used, unkept)


def _run(
    requests: Sequence[Request], workers: int | None, scheduler: str | None
) -> Generator[tuple[int, CellResult], None, None]:
    if not requests:
        return
    if scheduler is not None:
        from memcalc.cells.cluster import run_on_cluster

        yield from run_on_cluster(requests, scheduler)
    else:
        from memcalc.cells.local_processes import run_here

        yield from run_here(requests, workers or cores())


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


CELLS = JsonLines("cell", 1, "cell of a sweep", "cells", "--cells", "sweep --by")

_VERDICTS = ("fits", "does-not-fit", "unknown", None)
_MOST_BYTES = 2**63  # bound of any figure; no memory is as large


class ResultFile:
    """The answers in a sweep's file.

    Args:
        path: the file; it need not exist.

    Raises:
        InputError: the file has other content, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        CELLS.check(path)
        self.path = path
        self.answers: dict[str, CellResult] = {}  # by digest of the cell
        for number, line in enumerate(CELLS.read(path) if path.is_file() else (), start=1):
            digest, answer = line.get("digest"), _answer(line)
            if answer is None or not isinstance(digest, str):
                raise InputError(
                    f"this line is not a {CELLS.one}: a value is missing or wrong.",
                    f"Name a file that `{CELLS.writer}` wrote.",
                    f"{path}:{number}",
                )
            self.answers[digest] = answer

    def find(self, cell: GridCell) -> CellResult | None:
        """Return the stored answer of a cell; None: there is none, or its process was killed."""
        answer = self.answers.get(cell.digest)
        return None if answer is None or answer.outcome == "lost" else answer

    def add(self, cell: GridCell, answer: CellResult) -> None:
        """Store an answer. It is on the disk when this returns.

        Raises:
            NotWritten: the disk is full.
        """
        line = {
            CELLS.key: CELLS.version,
            "digest": cell.digest,
            "by": cell.request["by"],
            "values": dict(cell.values),
            **asdict(answer),
        }
        CELLS.append((line,), self.path)


def _answer(line: dict[str, Any]) -> CellResult | None:
    """Return the answer of a line; None: a value is missing or wrong."""
    values: dict[str, Any] = {each.name: line.get(each.name) for each in fields(CellResult)}
    sizes = (value for name, value in values.items() if name.endswith("_bytes"))
    phase, seconds, reason = values["peak_phase"], values["seconds"], values["reason"]
    if (
        values["outcome"] not in get_args(Outcome)
        or values["verdict"] not in _VERDICTS
        or not all(size is None or (type(size) is int and abs(size) < _MOST_BYTES) for size in sizes)
        or not isinstance(phase, str | None)
        or not (type(seconds) in (int, float) and math.isfinite(seconds))
        or not isinstance(reason, str)
    ):
        return None
    return replace(CellResult(**values), reason=message_part(reason))
