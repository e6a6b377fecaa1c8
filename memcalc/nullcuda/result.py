"""Result of a dry run: each process's peaks on each GPU, from PyTorch's own allocator."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memcalc.ledger.verdict import Answer
from memcalc.nullcuda.options import BALANCED
from memcalc.spec.hardware.gpus import GpuSpec, all_gpus

WITHOUT_WEIGHTS = re.compile(
    r"does not appear to have (a|any) files? named|no file named|couldn't connect to 'https://huggingface.co'"
    r"|is not a local folder and is not a valid model identifier|Cannot find an appropriate cached snapshot folder"
    r"|cannot find the requested files in the (disk|local) cache",
    re.IGNORECASE,
)  # transformers 5.23 utils/hub.py and modeling_utils.py, huggingface_hub 1.x errors.py

DONE, STOPPED, OUT_OF_MEMORY = "done", "stopped after the requested steps", "out of memory"
TIMED_OUT, INTERRUPTED, FAILED = "timed out", "interrupted", "failed"
WHOLE = (DONE, STOPPED)  # outcomes of complete runs

LINES_SHOWN = 10  # of the program, with reads of unknown values
LONGEST_MESSAGE = 160  # letters of an exception's message

NOT_MODELLED = (
    "device memory of the context and loaded kernels is a stated default, and NCCL's buffers are a rule",
    "kernels compute nothing: branches on values other than small integers and booleans may differ on a real GPU",
    "cuDNN's attention is switched off: on Hopper and Blackwell flash attention runs instead, with 256 bytes less",
    "convolutions run without cuDNN's workspace; calls of cuSOLVER, cuSPARSE and cuFFT are rejected",
    "processes that share a GPU do not see each other's memory",
)


@dataclass(frozen=True, slots=True)
class Usage:
    """Peak memory of one process on one GPU. Bytes."""

    process: int  # its process id
    rank: int | None  # its rank; None: it is not part of a multi-rank job
    device: int  # index of the GPU in its process
    allocated_bytes: int  # bytes of tensors, in the allocator's blocks
    reserved_bytes: int  # bytes reserved by the caching allocator
    device_bytes: int  # reserved memory, CUDA context and loaded kernels, communication library, other libraries
    communication_bytes: int  # NCCL's part of device_bytes
    retries: int  # number of times the allocator freed its cache to the driver to continue
    ooms: int  # number of failed requests


@dataclass(frozen=True, slots=True)
class DeviceCounters:
    """Counters of a process by the device itself, up to its last request for memory."""

    most_bytes: tuple[int, ...]  # peak of each GPU, including context and loaded kernels
    communication_bytes: int  # NCCL's part of them
    steps: int = 0  # optimizer steps that the process had taken
    ooms: tuple[int, ...] = ()  # failed requests on each GPU


@dataclass(frozen=True, slots=True)
class Allocation:
    """Live bytes of one line of the program on a GPU at the peak."""

    process: int
    device: int
    location: str
    bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class UnknownRead:
    """A line of the program that read unknown values of the device; it got zeros."""

    location: str  # file, line and function
    count: int  # number of reads


@dataclass(frozen=True, slots=True)
class PythonProcess:
    """One Python process of the command that imported torch."""

    number: int  # its process id
    rank: int | None  # its rank; None: it is not part of a multi-rank job
    arguments: tuple[str, ...]  # sys.argv
    torch: str  # version of torch
    steps: int  # optimizer steps that it took
    failure: tuple[str, str] | None  # type and message of the exception that ended it, if any
    usages: tuple[Usage, ...]  # its GPUs
    allocations: tuple[Allocation, ...]  # the largest allocations at each GPU's peak, if they were recorded
    reads: int  # copies from the device to the host
    small_reads: int  # reads of unknown values that are small enough to decide by, rather than to store
    unmodelled: tuple[str, ...]  # library functions that it called and that the device rejected
    masks: int = 0  # number of unknown masks that it selected by; each was assumed to be full
    unknown_reads: tuple[UnknownRead, ...] = ()  # the lines of the program that made the `small_reads`
    choices: int = 0  # index tensors that unknown scores chose, such as experts and next tokens; these were assumed
    values: bool = True  # whether small tensors have known values: the device was built with a C++ compiler
    unreported: bool = False  # it was killed after requests for memory that none of its reports includes
    checkpoints: int = 0  # files with tensors that it wrote
    first_checkpoint: str = ""  # path of the first

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether an out-of-memory error ended it, including one that was passed to a parent process."""
        if self.failure is not None:
            kind, message = self.failure
            return kind == "OutOfMemoryError" or "CUDA out of memory" in message
        return False

    @property
    def lacked_weights(self) -> bool:
        """Whether it failed because there was no checkpoint to load."""
        return self.failure is not None and WITHOUT_WEIGHTS.search(self.failure[1]) is not None

    @property
    def ran_out(self) -> bool:
        """Whether a request ever failed, even if the program continued."""
        return any(usage.ooms for usage in self.usages)


@dataclass(frozen=True, slots=True)
class DryRun:
    """A command that ran on the null device.

    Args:
        command: the command.
        gpu: the GPU.
        gpus: number of GPUs.
        outcome: how it ended.
        exit_code: the command's own; 128 + n if signal n ended it.
        seconds: duration of the run.
        processes: processes that used a GPU, ordered by rank.
        lost: number of processes that could not write their last report, because the disk was full.
        routing: what unknown scores chose, see `memcalc.nullcuda.options.Options`.
        weights_missing: whether a process found no weights to load, possibly before it used the GPU.
        failure: type and message of the exception that ended the first process that failed, possibly before it used
            the GPU.
    """

    command: tuple[str, ...]
    gpu: GpuSpec
    gpus: int
    outcome: str
    exit_code: int
    seconds: float
    processes: tuple[PythonProcess, ...]
    lost: int = 0
    routing: str = BALANCED
    weights_missing: bool = False
    failure: tuple[str, str] | None = None

    @property
    def usages(self) -> tuple[Usage, ...]:
        """The GPUs of all processes."""
        return tuple(usage for process in self.processes for usage in process.usages)

    @property
    def peak(self) -> Usage | None:
        """The GPU with the highest peak; None if none was used."""
        return max(self.usages, key=lambda usage: usage.device_bytes, default=None)

    @property
    def allocated_bytes(self) -> int:
        """Highest peak of tensors on one GPU."""
        return max((usage.allocated_bytes for usage in self.usages), default=0)

    @property
    def reserved_bytes(self) -> int:
        """Highest peak of reserved memory on one GPU."""
        return max((usage.reserved_bytes for usage in self.usages), default=0)

    @property
    def device_bytes(self) -> int:
        """Highest peak of device memory on one GPU."""
        return max((usage.device_bytes for usage in self.usages), default=0)

    @property
    def ran_out(self) -> bool:
        """Whether the GPU's memory ended a process."""
        return self.outcome == OUT_OF_MEMORY or any(process.ran_out_of_memory for process in self.processes)

    @property
    def fits(self) -> bool | None:
        """Whether the GPU is large enough; None if unknown: see `doubt`."""
        if self.ran_out:
            return False
        if self.peak is not None and self.device_bytes > self.gpu.usable_bytes:
            return False
        return None if self.doubt else True

    @property
    def answer(self) -> Answer | None:
        """The verdict as one word; None if no process used the GPU."""
        if self.fits is None:
            return None if self.peak is None else "unknown"
        return "fits" if self.fits else "does-not-fit"

    @property
    def doubt(self) -> str:
        """Why these figures do not decide whether the command fits; "" if they do."""
        ooms = sum(usage.ooms for usage in self.usages)
        if self.peak is None:
            return f"no process of the command used the GPU through PyTorch{self._cause()}"
        if ooms:
            went_on = "continued with a fallback" if self.outcome in WHOLE else f"ended differently ({self.outcome})"
            return f"the GPU's memory ran out {times(ooms)}, and the program {went_on}"
        if self.outcome not in WHOLE and not any(process.steps for process in self.processes):
            return f"{self.outcome} before the first optimizer step was complete{self._cause()}"
        return ""

    def _cause(self) -> str:
        """Return the exception that ended the command, in parentheses; "" if there was none."""
        return "" if self.failure is None else f" ({failure_line(self.failure)})"

    @property
    def headroom_bytes(self) -> int | None:
        """Free memory of the fullest GPU; None if the command did not use one, or if it ran out."""
        return None if not self.fits else self.gpu.usable_bytes - self.device_bytes

    @property
    def would_fit(self) -> tuple[GpuSpec, ...]:
        """GPUs of the table with enough memory for these peaks, smallest first.

        On another GPU the same step may need slightly more or less: workspaces and kernels differ.
        """
        if not self.fits:
            return ()
        gpus = [gpu for gpu in all_gpus() if gpu.vendor == "nvidia" and gpu.usable_bytes >= self.device_bytes]
        return tuple(sorted(gpus, key=lambda gpu: gpu.usable_bytes))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Limitations of the figures."""
        found = []
        if not self.processes:
            found.append("no process of the command used the GPU through PyTorch: nothing was measured")
        found += self._about_values()
        masks = sum(process.masks for process in self.processes)
        if masks:
            found.append(
                f"elements were selected by an unknown mask {times(masks)}: each mask is assumed to select all of them"
            )
        retries = sum(usage.retries for usage in self.usages)
        if retries:
            found.append(f"the allocator freed its cache {times(retries)} to continue, which costs time")
        found += [
            f"process {process.number} was killed before its last report: allocated memory is a lower bound; reserved "
            "and device memory are complete"
            for process in self.processes
            if process.unreported
        ]
        ooms = sum(usage.ooms for usage in self.usages)
        if ooms and not self.ran_out:
            found.append(
                f"the GPU's memory ran out {times(ooms)}, and the program continued: the figures cover the whole run"
            )
        if self.weights_missing:
            found.append(
                "the program found no weights to load: --random-weights builds the model from its config alone"
            )
        files = sum(process.checkpoints for process in self.processes)
        if files:
            path = next(process.first_checkpoint for process in self.processes if process.checkpoints)
            found.append(
                f"{files} checkpoint file{'s' if files > 1 else ''} written, with zeros for weights ({path}): do not "
                "load them, or end the run earlier with --steps"
            )
        unmodelled = sorted({name for process in self.processes for name in process.unmodelled})
        if unmodelled:
            found.append(f"functions that the null device rejected: {', '.join(unmodelled)}")
        by_card: dict[int, set[int]] = {}
        for usage in self.usages:
            by_card.setdefault(usage.device, set()).add(usage.process)
        shared = sorted(device for device, processes in by_card.items() if len(processes) > 1)
        if shared:
            gpus = ", ".join(f"cuda:{device}" for device in shared)
            found.append(f"several processes used {gpus}: each process is checked as if the GPU had no other process")
        return tuple(found)

    def _about_values(self) -> list[str]:
        """Return notes on unknown values that the program read, by line, and on choices by unknown scores."""
        found = []
        if not all(process.values for process in self.processes):
            found.append(
                "values of small tensors are unknown: src/values.cpp was not compiled when the null device was built. "
                "Install a C++ compiler (c++, g++ or clang++)."
            )
        reads: dict[str, int] = {}
        for process in self.processes:
            for read in process.unknown_reads:
                reads[read.location] = reads.get(read.location, 0) + read.count
        lines = sorted(reads.items(), key=lambda item: -item[1])
        found += [
            f"{where} read a value that kernels should have computed {times(count)}: the null device returned 0, so "
            "branches on it may differ on a real GPU"
            for where, count in lines[:LINES_SHOWN]
        ]
        if len(lines) > LINES_SHOWN:
            found.append(f"{len(lines) - LINES_SHOWN} more lines read unknown values")
        choices = sum(process.choices for process in self.processes)
        if choices:
            rule = (
                "all equally often (--routing worst-case: the same for every token)"
                if self.routing == BALANCED
                else "the same for every token (--routing balanced: all equally often)"
            )
            found.append(f"experts or tokens were chosen by unknown scores {times(choices)}: {rule}")
        return found


def failure_line(failure: tuple[str, str]) -> str:
    """Return an exception's type and the first line of its message; the program's own output has all of it."""
    kind, message = failure
    first = message.strip().partition("\n")[0]
    if len(first) > LONGEST_MESSAGE:
        first = first[:LONGEST_MESSAGE].rpartition(" ")[0] + " ..."
    return f"{kind}: {first}"


def times(number: int) -> str:
    """Return "once" or "2 times"."""
    return "once" if number == 1 else f"{number:,} times"


def process_from_report(
    report: Mapping[str, Any], books: DeviceCounters | None = None, context_bytes: int = 0
) -> PythonProcess:
    """Return the process of a report of memcalc/nullcuda/hook/memcalc_watch.py.

    A process that was killed may have requested more memory after its last report. The device's counters include that,
    but not how much of it was tensors.

    Args:
        report: the last report of the process.
        books: the device's counters; None: there are none.
        context_bytes: bytes of the GPU's context and loaded kernels.
    """
    number, rank = report["pid"], report["ranks"].get("rank")
    counts = report["counts"]
    none = {"allocated_bytes": 0, "reserved_bytes": 0, "device_bytes": 0, "ooms": 0, "retries": 0}
    devices = {int(device): peaks for device, peaks in report["devices"].items()}
    communication, unreported = counts["communicator_bytes"], False
    if books is not None:
        communication = max(communication, books.communication_bytes)
        for device, most in enumerate(books.most_bytes):
            last = devices.get(device, none)
            reserved = most - context_bytes - (books.communication_bytes if len(books.most_bytes) == 1 else 0)
            if most > last["device_bytes"] and reserved > last["reserved_bytes"]:
                devices[device] = last | {"device_bytes": most, "reserved_bytes": reserved}
                unreported = True
        for device, ooms in enumerate(books.ooms):
            last = devices.get(device, none)
            if ooms > last["ooms"]:
                devices[device] = last | {"ooms": ooms}
    usages = [
        Usage(
            process=number,
            rank=rank,
            device=device,
            allocated_bytes=peaks["allocated_bytes"],
            reserved_bytes=peaks["reserved_bytes"],
            device_bytes=peaks["device_bytes"],
            communication_bytes=communication,
            retries=peaks["retries"],
            ooms=peaks["ooms"],
        )
        for device, peaks in sorted(devices.items())
        if peaks["reserved_bytes"] or peaks["ooms"]
    ]
    return PythonProcess(
        number=number,
        rank=rank,
        arguments=tuple(report["arguments"]),
        torch=report["torch"],
        steps=max(report["steps"], 0 if books is None else books.steps),
        failure=None if report["failure"] is None else (report["failure"][0], report["failure"][1]),
        usages=tuple(usages),
        allocations=tuple(
            Allocation(number, each["device"], each["where"], each["bytes"], each["count"])
            for each in report["allocations"]
        ),
        reads=counts["reads"],
        small_reads=counts["small_reads"],
        unmodelled=tuple(report["unmodelled"]),
        masks=report["masks"],
        unknown_reads=tuple(UnknownRead(read["where"], read["count"]) for read in report["unknown_reads"]),
        choices=report["choices"],
        values=report["values"],
        unreported=unreported,
        checkpoints=report["checkpoints"]["count"],
        first_checkpoint=report["checkpoints"]["first"],
    )
