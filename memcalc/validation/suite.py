"""Suites: a file with a list of runs to measure. An interruption loses at most one run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from memcalc.errors import InputError, MemcalcError, NotWritten, Unavailable
from memcalc.files import is_file, read_text
from memcalc.measuring.client import Worker
from memcalc.measuring.job import Job
from memcalc.measuring.measure import measured
from memcalc.measuring.measurement import DONE, MeasuredDevice
from memcalc.measuring.records import RECORDS, read_measured
from memcalc.measuring.result import allocator_conf
from memcalc.progress import Progress, silent
from memcalc.spec.fields import describe
from memcalc.spec.loading import load
from memcalc.spec.rule_sets.inference import of_training
from memcalc.spec.spec import Spec
from memcalc.spec.yaml_source import parse_yaml
from memcalc.validation.max_micro_batch import LargestMicroBatch, predicted

MOST_STEPS = 1_000  # as in `measure --steps`; a steady state needs only a few
STEPS = 2  # the first step creates the optimizer states; the second is the steady state

KEYS = {"steps", "runs", "largest_batch"}
RUN_KEYS = {"run", "alloc_conf", "steps"}


@dataclass(frozen=True)
class SuiteRun:
    """One entry of a suite."""

    overrides: str  # a configuration and overrides, as on a command line: "gpt2 b=4 recipe=pure"
    steps: int = STEPS  # optimizer steps
    alloc_conf: str = ""  # PYTORCH_CUDA_ALLOC_CONF; "": as in the environment
    directory: str = ""  # directory that paths of configurations are relative to

    def spec(self, *overrides: str) -> Spec:
        """Return the run that the entry describes."""
        source, *own = self.overrides.split()
        path = Path(self.directory, source)
        return of_training(load(str(path) if is_file(path) else source, (*own, *overrides)), "measure")

    def command(self, *overrides: str) -> str:
        """Return the command that measures this entry alone."""
        source, *own = self.overrides.split()
        sets = " ".join(f"--set {override}" for override in (*own, *overrides))
        settings = f" --alloc-conf {self.alloc_conf}" if self.alloc_conf else ""
        return f"memcalc measure {source} {sets} --steps {self.steps}{settings}".replace("  ", " ")


@dataclass(frozen=True)
class Suite:
    """Runs to measure, followed by searches for the largest micro-batch that fits."""

    runs: tuple[SuiteRun, ...]
    largest: tuple[SuiteRun, ...]


@dataclass(frozen=True)
class SuiteOutcome:
    """Results of a suite.

    Args:
        records: records of all its runs on this device, in the order of the suite, including those of earlier sessions.
        largest: its searches for the largest micro-batch.
        refused: runs that could not be measured, each with the reason.
        fresh: number of runs measured in this session.
        unkept: why the last record could not be written, which ended the suite; None: all are kept.
    """

    records: tuple[dict[str, Any], ...]
    largest: tuple[LargestMicroBatch, ...]
    refused: tuple[tuple[str, str], ...]
    fresh: int
    unkept: NotWritten | None = None


def load_suite(path: str | Path) -> Suite:
    """Return the suite of a file.

    Raises:
        InputError: the file is not a suite, or one of its runs is not a configuration.
    """
    content = parse_yaml(read_text(path, remedy="Name a file of runs."), str(path)).data
    if not isinstance(content, dict) or not content.get("runs") or content.keys() - KEYS:
        raise InputError(
            f"a suite needs runs, and may have steps and largest_batch; the file has {_named(content)}.",
            "Write `runs:` and below it lines such as `- gpt2 b=4 recipe=pure`.",
            str(path),
        )
    steps = _steps(content.get("steps", STEPS), f"{path}: steps")
    lists = {name: content.get(name) or [] for name in ("runs", "largest_batch")}
    for name, entries in lists.items():
        if not isinstance(entries, list):
            raise InputError(f"{name} is {describe(entries)}, not a list.", "Write each run after a dash.", str(path))
    folder = Path(path).parent
    runs, largest = (
        tuple(_run(entry, steps, f"{path}: {name}[{number}]", folder) for number, entry in enumerate(entries))
        for name, entries in lists.items()
    )
    return Suite(runs, largest)


def _named(content: object) -> str:
    return ", ".join(map(str, content)) if isinstance(content, dict) else describe(content)


def _steps(value: object, where: str) -> int:
    if type(value) is not int or not 1 <= value <= MOST_STEPS:
        raise InputError(
            f"steps = {describe(value)} is not a number from 1 to {MOST_STEPS:,}.",
            f"Set 1 to {MOST_STEPS}, e.g. 2.",
            where,
        )
    return value


def _run(entry: object, steps: int, where: str, folder: Path) -> SuiteRun:
    values = {"run": entry} if isinstance(entry, str) else entry
    if not isinstance(values, dict) or not isinstance(values.get("run"), str) or values.keys() - RUN_KEYS:
        raise InputError(
            f"{describe(entry)} is not a run.",
            "Write a configuration and overrides, or a mapping with run, alloc_conf.",
            where,
        )
    alloc_conf = values.get("alloc_conf", "")
    if not isinstance(alloc_conf, str) or not values["run"].split():
        raise InputError(f"{describe(entry)} is not a run.", "Write run and alloc_conf as text.", where)
    run = SuiteRun(values["run"], _steps(values.get("steps", steps), where), alloc_conf, str(folder))
    try:
        run.spec()
    except InputError as error:
        raise error.located(where) from None
    return run


class SuiteSession:
    """One pass through a suite on one device, which resumes from a file of records.

    Args:
        worker: the process that measures.
        device: the device by its name in the worker.
        records: the file. Runs that it has for this device, PyTorch and allocator are not measured again.
    """

    def __init__(self, worker: Worker, device: str | None, records: Path) -> None:
        self.worker = worker
        self.device = device
        self.records = records
        self.described, self.versions = worker.describe(device)
        self.known = {key_of_record(record): record for record in read_measured(records)}
        self.fresh = 0

    def measured(self, run: SuiteRun, *overrides: str) -> dict[str, Any]:
        """Return the record of a run, from the file or from a new measurement.

        Raises:
            NotWritten: the record could not be written; `known` has it nevertheless.
            MemcalcError: the run cannot be measured.
        """
        spec = run.spec(*overrides)
        key = key_of(spec, run.steps, self._conf(run), self.described, self.versions["torch"])
        if key not in self.known:
            # Runs of a suite may be intended to run out of memory, so no weight_bytes are given.
            job = Job(spec, run.steps, self.device, run.alloc_conf, self.worker.events, force=False)
            measurement = measured(job, self.worker.run(job), run.command(*overrides))
            self.known[key] = measurement.to_record()
            self.fresh += 1
            RECORDS.append((self.known[key],), self.records)
        return self.known[key]

    def fits(self, run: SuiteRun, batch: int) -> bool:
        """Whether a run with another micro-batch ends, by its record. Raises as `measured`."""
        outcome: str = self.measured(run, f"micro_batch_size={batch}")["outcome"]
        return outcome == DONE

    @staticmethod
    def _conf(run: SuiteRun) -> str:
        return run.alloc_conf or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""


def run_suite(
    suite: Suite, worker: Worker, device: str | None, records: Path, progress: Progress = silent
) -> SuiteOutcome:
    """Measure every run that has no record yet; each record is on the disk before the next run starts.

    Raises:
        Unavailable: there is no such device, or another suite uses the same file.
        InputError: the file has other content than records.
    """
    RECORDS.check(records)
    with alone_with(records):
        sitting = SuiteSession(worker, device, records)
        found: list[dict[str, Any]] = []
        searches: list[LargestMicroBatch] = []
        refused: list[tuple[str, str]] = []
        total = len(suite.runs) + len(suite.largest)
        for number, run in enumerate(suite.runs):
            progress(run.overrides, number, total)
            try:
                found.append(sitting.measured(run))
            except NotWritten as error:
                return SuiteOutcome(tuple(sitting.known.values()), (), tuple(refused), sitting.fresh, error)
            except MemcalcError as error:
                refused.append((run.overrides, str(error)))
        for number, run in enumerate(suite.largest, start=len(suite.runs)):
            progress(f"largest batch of {run.overrides}", number, total)
            if sitting.described.kind == "cpu":
                refused.append((f"largest batch of {run.overrides}", "a CPU has no separate memory limit."))
                continue
            search = LargestMicroBatch(run.overrides, predicted(run.spec(), sitting.described, run.alloc_conf))
            try:
                search.search(partial(sitting.fits, run))
            except NotWritten as error:
                return SuiteOutcome(
                    tuple(sitting.known.values()), tuple(searches), tuple(refused), sitting.fresh, error
                )
            except MemcalcError as error:
                refused.append((f"largest batch of {run.overrides}", str(error)))
            searches.append(search)
        progress("done", total, total)
        return SuiteOutcome(tuple(found), tuple(searches), tuple(refused), sitting.fresh)


def key_of(spec: Spec, steps: int, alloc_conf: str, device: MeasuredDevice, torch: str) -> str:
    """Return the key by which runs are equal: configuration, steps, allocator settings, device and PyTorch version."""
    return _key(spec.model_dump(mode="json"), steps, alloc_conf, device.kind, device.name, torch)


def key_of_record(record: dict[str, Any]) -> str:
    """Return the key of `key_of` for a run that is recorded."""
    device, conf = record["device"], allocator_conf(record["allocator"])
    steps = record.get("steps", 3)  # records of version 1 do not state their steps
    return _key(record["spec"], steps, conf, device["kind"], device["name"], record["versions"]["torch"])


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@contextmanager
def alone_with(records: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file of records; it is released when the process ends.

    The lock is a hidden file next to the records, with this user's permissions, and is removed at the end. A lock file
    left by a killed process is reused.

    Raises:
        Unavailable: another suite appends to the file, or the lock cannot be created.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    if records.exists() and not records.is_file():  # a device such as /dev/null, which keeps nothing
        yield
        return
    file = records.resolve()
    lock = file.with_name(f".{file.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_file_at(descriptor, lock):
                break
            os.close(descriptor)  # its previous holder has just removed it
    except BlockingIOError:
        os.close(descriptor)
        raise Unavailable(
            f"{records} is busy: another suite adds to it. Wait for it, or name another --record."
        ) from None
    except OSError as error:
        raise NotWritten(str(lock), error.strerror or str(error), "Name another --record.") from None
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink()
        os.close(descriptor)


def _is_file_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the file at this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
