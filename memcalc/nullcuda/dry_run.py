"""The verb `dry-run`: any training command on the null device, every process of it watched."""

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

from memcalc.errors import NotWritten
from memcalc.folders import stale_folders, temporary_folder
from memcalc.nullcuda.cards import find_null_card
from memcalc.nullcuda.interpreters import interpreters
from memcalc.nullcuda.launcher import environment
from memcalc.nullcuda.options import BALANCED, Options
from memcalc.nullcuda.processes import Ending, end_all, run_to_end
from memcalc.nullcuda.result import (
    DONE,
    FAILED,
    INTERRUPTED,
    OUT_OF_MEMORY,
    STOPPED,
    TIMED_OUT,
    Books,
    DryRun,
    Process,
    process_from_report,
)
from memcalc.spec.cards import Card

REPORTS = "memcalc-dry-run-"  # how the directories of reports are called
RESERVE = "reserve"  # as hook/memcalc_watch.py has it
MOST_DEVICES = 64  # as src/device.c has it
SIGNALS = 128  # exit codes above it are those of signals
RESERVED = 1 << 20  # bytes; a report has some thousand, with the history of allocations a hundred times that


def run(
    command: Sequence[str],
    card: str,
    *,
    gpus: int = 1,
    timeout: float | None = None,
    stdout: int | IO[str] | None = None,
    **options: Unpack[Options],
) -> DryRun:
    """Run a command on cards that are not there, and say what each of its processes held.

        step = memcalc.nullcuda.run([sys.executable, "train.py"], "h100-80gb", steps=2)
        assert step.device_bytes < 70 * 2**30

    Args:
        command: the program and its arguments.
        card: a card of `memcalc gpus`.
        gpus: how many.
        timeout: seconds after which the command and all that it started is ended.
        stdout: where the command's output goes, as for `subprocess.run`; None: where this process's goes.
        options: see `memcalc.nullcuda.options.Options`.

    Raises:
        InputError: no such card or command.
        Unavailable: something that the null device needs is missing.
    """
    words = tuple(command)
    found = find_null_card(card)
    pythons = interpreters(words)
    end_abandoned()
    with temporary_folder(REPORTS) as reports:
        keep_room(reports)
        variables = environment(card, gpus, pythons=pythons, reports=reports, **options)
        start = time.monotonic()
        try:
            ending = run_to_end(words, os.environ | variables, timeout=timeout, stdout=stdout)
        finally:
            end_all(str(reports))  # nothing, unless the supervisor was killed
        seconds = time.monotonic() - start
        processes = read_reports(reports, found)
        lost = len(list(reports.glob("*.lost")))
    stopped = any(report_stopped for _, report_stopped in processes)
    used = tuple(process for process, _ in processes if process.usages)
    outcome = _outcome(ending, used, stopped=stopped)
    routing = options.get("routing", BALANCED)
    missing = any(process.found_no_weights for process, _ in processes)
    return DryRun(words, found, gpus, outcome, ending.code, seconds, used, lost, routing, missing)


def end_abandoned() -> None:
    """End what dry runs that were killed have left running; their directories go with the next one that is made."""
    for folder in stale_folders(REPORTS, Path(tempfile.gettempdir())):
        end_all(str(folder))


def keep_room(folder: Path) -> None:
    """Take the room of some reports, which a process gives back that finds the disk full.

    Raises:
        NotWritten: there is no room for them.
    """
    try:
        (folder / RESERVE).write_bytes(bytes(RESERVED))  # zeros, and not a hole
    except OSError as error:
        remedy = "Free space there, or set TMPDIR to another place."
        raise NotWritten(str(folder), error.strerror or str(error), remedy) from None


def read_reports(folder: Path, card: Card) -> list[tuple[Process, bool]]:
    """The processes that reported, by rank, and whether each was stopped after its steps.

    Args:
        folder: of the reports, and of the books that the device kept of each process.
        card: on which they ran.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        books = read_books(path.with_suffix(".books"))
        found.append((process_from_report(report, books, card.context_bytes), bool(report["stopped"])))
    return sorted(found, key=lambda item: (item[0].rank is None, item[0].rank or 0, item[0].number))


def read_books(path: Path) -> Books | None:
    """The figures of `struct books` in src/device.c; None: the process has none."""
    try:
        numbers = struct.unpack(f"<{3 + 2 * MOST_DEVICES}q", path.read_bytes())
    except (OSError, struct.error):
        return None
    devices, communicator_bytes, steps, *most = numbers
    ooms = most[MOST_DEVICES:][:devices]
    return Books(tuple(most[:devices]), communicator_bytes, steps, tuple(ooms))


def _outcome(ending: Ending, processes: tuple[Process, ...], *, stopped: bool) -> str:
    if ending.interrupted:
        return INTERRUPTED
    if ending.timed_out:
        return TIMED_OUT
    if ending.code == 0:
        return STOPPED if stopped else DONE
    if any(process.died_of_memory for process in processes):
        return OUT_OF_MEMORY
    # A worker that passes its exception on to its parent ends without one of its own; a killed one may have caught it.
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
