"""Baseline: the JSON of an earlier `check`."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memcalc.checking.report import PeakGrowth, Sizes
from memcalc.errors import InputError
from memcalc.files import MOST_REPORT_BYTES, plain_json, read_text
from memcalc.spec.fields import describe

Baseline = Mapping[str, Mapping[str, int]]  # by path: bytes by "allocated", "reserved" and "device"

VERSION = 2
READABLE = (1, 2)  # in version 1, reserved and device memory were allocated memory times a factor
MOST_BYTES = 10**30  # of one GPU: larger than any estimate, and still a finite float
_REMEDY = "A baseline is the output of `memcalc check ... --format json`."
_NUMBERS = {"allocated": "allocated_bytes", "reserved": "reserved_bytes", "device": "device_bytes"}


def read_baseline(path: str | Path) -> Baseline:
    """Return the peaks of a stored report by config; invalid configs have none.

    Raises:
        InputError: the file cannot be read, or is not a report of `check`.
    """
    where = f"--baseline: {path}"
    try:
        data: Any = plain_json(read_text(path, MOST_REPORT_BYTES, _REMEDY), where, _REMEDY)
    except InputError as error:
        raise InputError(error.problem, error.remedy, where) from None
    configs = data.get("configs") if isinstance(data, dict) else None
    if not isinstance(configs, list):
        raise _refused(path, "the file has no list of configs.")
    version = data.get("schema_version")
    if version not in READABLE:
        raise _refused(path, f"schema_version = {describe(version)} is not {VERSION}.")
    found: dict[str, dict[str, int]] = {}
    for number, config in enumerate(configs):
        if not isinstance(config, dict) or not isinstance(config.get("path"), str):
            raise _refused(path, f"configs[{number}] has no path.")
        comparable = _NUMBERS if version == VERSION else {"allocated": "allocated_bytes"}
        peaks = {name: config.get(key) for name, key in comparable.items()}
        wrong = [name for name, size in peaks.items() if size is not None and not _is_size(size)]
        if wrong:
            raise _refused(path, f"configs[{number}].{_NUMBERS[wrong[0]]} is not a whole number of bytes.")
        found[same_path(config["path"])] = {name: size for name, size in peaks.items() if size is not None}
    return found


def same_path(path: str) -> str:
    """Return the canonical spelling of a path on any system: "a/b.yaml" for "./a//b.yaml"."""
    return posixpath.normpath(path.replace("\\", "/"))


def growth_of(path: str, sizes: Sizes, baseline: Baseline) -> tuple[int, int] | None:
    """Return the baseline's peak and the change in bytes, in device memory, else in allocated memory.

    A run that a lower bound decided has no device memory, then or now.
    """
    before = baseline.get(same_path(path), {})
    for name in ("device", "allocated"):
        then, now = before.get(name), sizes.of(name)
        if then is not None and now is not None:
            return then, now - then
    return None


def with_allowance(change: tuple[int, int] | None, allowed: int | None) -> PeakGrowth | None:
    """Return the change with its allowance."""
    return None if change is None else PeakGrowth(change[0], change[1], allowed)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < MOST_BYTES


def _refused(path: str | Path, problem: str) -> InputError:
    return InputError(problem, _REMEDY, f"--baseline: {path}")
