"""A recorded run: its memory timeline, its allocator replay, and its verdict on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.allocator import FailedAllocation, History, history
from memcalc.allocator.pytorch.versions import DEFAULT_VERSION
from memcalc.events.event import Event
from memcalc.events.timeline import Timeline, timeline
from memcalc.ledger.ledger import Ledger
from memcalc.progress import Progress, silent
from memcalc.recorder.ledger import traced_ledger
from memcalc.recorder.recording import Recording
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.hardware.kernels import gpu_omissions
from memcalc.units import Unit, format_bytes

# Allocator settings tried in this order for a run that fails with the requested ones.
REMEDIES = ("expandable_segments:True", "max_split_size_mb:512", "max_split_size_mb:128", "max_split_size_mb:32")


@dataclass(frozen=True, repr=False)
class RunAnalysis:
    """Analysis of a recorded run."""

    recording: Recording  # the recording
    timeline: Timeline  # the events with running totals
    replay: History | None  # the events replayed through the PyTorch allocator; None if the device has none
    ledger: Ledger  # live tensors at the peak of each phase, row by row
    gpu: GpuSpec | None  # the GPU to check against; None: no verdict
    reserved_bytes: int | None  # peak of reserved bytes; None without an allocator
    # where the run fails on the GPU, with PyTorch's message; None if it fits or no GPU was given
    failure: FailedAllocation | None
    remedy: str | None  # PYTORCH_CUDA_ALLOC_CONF with which a failing run fits; None if there is none or no need
    not_modelled: tuple[str, ...]  # what these figures leave out
    notes: tuple[str, ...]  # further information on this run for the reader

    def __repr__(self) -> str:
        """Return the peak, the verdict and the number of events in one line, without the events themselves."""
        unit: Unit = "GiB" if self.ledger.peak_bytes >= 2**30 else "MiB"
        peak = f"peak {format_bytes(self.ledger.peak_bytes, unit)} in {self.ledger.peak_phase}"
        answer = {True: "fits ", False: "does not fit ", None: ""}[self.fits]
        where = f"{answer}{self.gpu.name}" if self.gpu is not None else self.recording.device
        return f"<{type(self).__name__} {self.name}: {peak}; {where}; {len(self.events):,} events>"

    @property
    def name(self) -> str:
        """Name of the run."""
        return "run"

    @property
    def events(self) -> tuple[Event, ...]:
        """The recorded events, in order."""
        return self.recording.events

    @property
    def fits(self) -> bool | None:
        """Whether the run completes on the GPU; None without a GPU."""
        return None if self.gpu is None or self.reserved_bytes is None else self.failure is None


def judge(
    recording: Recording,
    gpu: GpuSpec | None,
    alloc_conf: str = "",
    version: str = DEFAULT_VERSION,
    progress: Progress = silent,
) -> RunAnalysis:
    """Return the analysis of a recording: totals, replay and verdict.

    Args:
        recording: of any run.
        gpu: the GPU to check against; None: no verdict.
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF.
        version: the PyTorch version of the simulated allocator.
        progress: called with the progress of the replay.

    Raises:
        InputError: PyTorch rejects the settings.
    """
    line = timeline(recording.events)
    replay = history(recording.events, alloc_conf, version, progress=progress) if recording.has_allocator else None
    reserved = _reserved(recording, replay)
    failure: FailedAllocation | None = None
    remedy: str | None = None
    if gpu is not None and reserved is not None and reserved > _room(gpu):
        # The allocator frees cached segments before it fails, so the run may still fit.
        tight = history(recording.events, alloc_conf, version, gpu.usable_bytes, used=gpu.context_bytes)
        failure = tight.result.failure
        if failure is not None and recording.died is not None:
            failure = FailedAllocation(failure.event, recording.died)
        if failure is None:
            reserved = tight.result.peak_reserved
        else:
            remedy = _remedy(recording, alloc_conf, version, gpu)
    return RunAnalysis(
        recording=recording,
        timeline=line,
        replay=replay,
        ledger=traced_ledger(line, None if replay is None else replay.allocated),
        gpu=gpu,
        reserved_bytes=reserved,
        failure=failure,
        remedy=remedy,
        not_modelled=(*gpu_omissions(gpu), *_not_modelled(recording)),
        notes=_notes(recording, failure, remedy, line),
    )


def _room(gpu: GpuSpec) -> int:
    return gpu.usable_bytes - gpu.context_bytes


def _reserved(recording: Recording, replay: History | None) -> int | None:
    if recording.reserved_bytes is not None:
        return recording.reserved_bytes
    return None if replay is None else replay.result.peak_reserved


def _remedy(recording: Recording, alloc_conf: str, version: str, gpu: GpuSpec) -> str | None:
    for remedy in REMEDIES:
        settings = f"{alloc_conf},{remedy}" if alloc_conf else remedy
        key = remedy.partition(":")[0]
        if key in alloc_conf:
            continue
        found = history(recording.events, settings, version, gpu.usable_bytes, used=gpu.context_bytes)
        if found.result.failure is None:
            return settings
    return None


def _not_modelled(recording: Recording) -> tuple[str, ...]:
    missing = ["device memory of the context and loaded kernels is a stated default"]
    if recording.device == "fake:cuda":
        missing.append("scratch of sorting by rows, of top-k over long rows and of cuDNN, inside operators")
    missing.append(
        "tensors have no values: branches that depend on them (routing of experts) may differ on a real device"
    )
    return tuple(missing)


def _notes(
    recording: Recording, failure: FailedAllocation | None, remedy: str | None, line: Timeline
) -> tuple[str, ...]:
    found = list(recording.notes)
    if recording.readbacks:
        times = "once" if recording.readbacks == 1 else f"{recording.readbacks} times"
        found.append(f"The run read values from the device {times}; every value read was zero.")
    if failure is not None:
        event = line.events[failure.event]
        where = f" of {event.module}" if event.module else ""
        found.append(
            f"It runs out of memory in {event.phase}, at {event.operator}{where} ({event.line}): {failure.message}"
        )
        if remedy is not None:
            found.append(f"It would fit with PYTORCH_CUDA_ALLOC_CONF={remedy}.")
    return tuple(found)
