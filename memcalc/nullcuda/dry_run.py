"""The command `dry-run`: any training command on the null device, with every process recorded."""

from __future__ import annotations

import json
import os
import signal
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Unpack

from memcalc.directories import stale_directories, temporary_directory
from memcalc.errors import NotWritten
from memcalc.nullcuda.gpu_description import MOST_GPUS, find_null_gpu
from memcalc.nullcuda.interpreters import interpreters
from memcalc.nullcuda.launcher import environment
from memcalc.nullcuda.options import BALANCED, Options
from memcalc.nullcuda.processes import CommandEnd, end_all, run_to_end
from memcalc.nullcuda.result import (
    DONE,
    FAILED,
    INTERRUPTED,
    OUT_OF_MEMORY,
    STOPPED,
    TIMED_OUT,
    DeviceCounters,
    DryRun,
    PythonProcess,
    process_from_report,
)
from memcalc.spec.hardware.gpus import GpuSpec

REPORTS = "memcalc-dry-run-"  # prefix of the directories of reports
RESERVE = "reserve"  # as in hook/memcalc_watch.py
SIGNALS = 128  # larger exit codes are those of signals
RESERVED = 1 << 20  # bytes; a report has a few thousand, with the allocation history a hundred times more


def run(
    command: Sequence[str],
    gpu: str,
    *,
    gpus: int = 1,
    timeout: float | None = None,
    stdout: int | IO[str] | None = None,
    **options: Unpack[Options],
) -> DryRun:
    """Run a command on emulated GPUs, and return the memory of each of its processes.

        step = memcalc.nullcuda.run([sys.executable, "train.py"], "h100-80gb", steps=2)
        assert step.device_bytes < 70 * 2**30

    Args:
        command: the program and its arguments.
        gpu: a GPU of `memcalc gpus`.
        gpus: number of GPUs.
        timeout: seconds after which the command and every process that it started are ended.
        stdout: destination of the command's output, as for `subprocess.run`; None: this process's.
        options: see `memcalc.nullcuda.options.Options`.

    Raises:
        InputError: the GPU or the command does not exist.
        Unavailable: a requirement of the null device is missing.
    """
    words = tuple(command)
    found = find_null_gpu(gpu)
    pythons = interpreters(words)
    end_abandoned()
    with temporary_directory(REPORTS) as reports:
        reserve_disk_space(reports)
        variables = environment(gpu, gpus, pythons=pythons, reports=reports, **options)
        start = time.monotonic()
        try:
            ending = run_to_end(words, os.environ | variables, timeout=timeout, stdout=stdout)
        finally:
            end_all(str(reports))  # nothing is left, unless the supervisor was killed
        seconds = time.monotonic() - start
        processes = read_reports(reports, found)
        failure = first_failure(reports)
        lost = len(list(reports.glob("*.lost")))
    stopped = any(report_stopped for _, report_stopped in processes)
    used = tuple(process for process, _ in processes if process.usages)
    outcome = _outcome(ending, used, stopped=stopped)
    routing = options.get("routing", BALANCED)
    missing = any(process.lacked_weights for process, _ in processes)
    return DryRun(words, found, gpus, outcome, ending.code, seconds, used, lost, routing, missing, failure)


def end_abandoned() -> None:
    """End processes left by killed dry runs; their directories are removed when the next one is made."""
    for folder in stale_directories(REPORTS, Path(tempfile.gettempdir())):
        end_all(str(folder))


def reserve_disk_space(folder: Path) -> None:
    """Reserve disk space for some reports; a process that finds the disk full frees it.

    Raises:
        NotWritten: there is no space.
    """
    try:
        (folder / RESERVE).write_bytes(bytes(RESERVED))  # zeros, so that the file is not sparse
    except OSError as error:
        remedy = "Free space there, or set TMPDIR to another directory."
        raise NotWritten(str(folder), error.strerror or str(error), remedy) from None


def read_reports(folder: Path, gpu: GpuSpec) -> list[tuple[PythonProcess, bool]]:
    """Return the processes that reported, ordered by rank, and whether each was stopped after its steps.

    Args:
        folder: directory of the reports, and of the device's counters of each process.
        gpu: the GPU that they ran on.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        books = read_books(path.with_suffix(".books"))
        found.append((process_from_report(report, books, gpu.context_bytes), bool(report["stopped"])))
    return sorted(found, key=lambda item: (item[0].rank is None, item[0].rank or 0, item[0].number))


def first_failure(folder: Path) -> tuple[str, str] | None:
    """Return type and message of the exception that ended the first process that failed: launchers fail after it."""
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
        failure = json.loads(path.read_text())["failure"]
        if failure is not None:
            return failure[0], failure[1]
    return None


def read_books(path: Path) -> DeviceCounters | None:
    """Return the figures of `struct books` in src/device.c; None: the process has none."""
    try:
        numbers = struct.unpack(f"<{3 + 2 * MOST_GPUS}q", path.read_bytes())
    except (OSError, struct.error):
        return None
    devices, communicator_bytes, steps, *most = numbers
    ooms = most[MOST_GPUS:][:devices]
    return DeviceCounters(tuple(most[:devices]), communicator_bytes, steps, tuple(ooms))


def _outcome(ending: CommandEnd, processes: tuple[PythonProcess, ...], *, stopped: bool) -> str:
    if ending.interrupted:
        return INTERRUPTED
    if ending.timed_out:
        return TIMED_OUT
    if ending.code == 0:
        return STOPPED if stopped else DONE
    if any(process.ran_out_of_memory for process in processes):
        return OUT_OF_MEMORY
    # A worker that passes its exception to its parent ends without one; a killed one may have caught it.
    by_signal = ending.code > SIGNALS
    if (
        not by_signal
        and all(process.failure is None for process in processes)
        and any(process.ran_out for process in processes)
    ):
        return OUT_OF_MEMORY
    if ending.code == 128 + signal.SIGINT:
        return INTERRUPTED
    return FAILED
