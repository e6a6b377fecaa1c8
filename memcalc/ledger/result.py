"""The result of an estimate, a trace, a dry run or a measurement: raw bytes, from which all reports are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from memcalc.jupyter import NotebookDisplay
from memcalc.ledger.ledger import Ledger
from memcalc.ledger.verdict import Answer, Interval, Verdict
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.limits import Limit
from memcalc.spec.spec import Spec
from memcalc.text import harmless
from memcalc.units import Unit, format_bytes

Source = Literal["estimate", "trace", "dry-run", "measure"]
Confidence = Literal["formula", "replay", "allocator", "measured"]


@dataclass(frozen=True, slots=True)
class Textbook:
    """The published closed-form estimates for one unsharded GPU."""

    parameters: int  # number of elements
    model_state_bytes: int  # weights, gradients and optimizer state
    activation_bytes: int  # saved for backward
    bytes_per_parameter: int  # of model states


@dataclass(frozen=True, slots=True)
class OutsideMemory:
    """Device memory that the process holds outside the blocks that PyTorch has allocated. Bytes."""

    cached_segments: int  # reserved, not allocated
    device_context: int  # CUDA context and kernels
    communication_library: int  # buffers of NCCL


class DeviceMemory(NamedTuple):
    """Device memory of a rank outside its allocated peak, in bytes; None if unknown."""

    reserved_bytes: int | None  # peak memory reserved by the PyTorch allocator
    # reserved memory plus the device context and the communication library; None without a GPU
    device_bytes: int | None
    outside: OutsideMemory  # the parts of device memory that are not allocated blocks


def known(memory: DeviceMemory) -> Callable[[], DeviceMemory]:
    """Return a function that returns `memory`, which is known already."""
    return lambda: memory


@dataclass(frozen=True, slots=True)
class RankResult:
    """One class of identical ranks: the ranks of one pipeline stage."""

    rank: dict[str, int]  # identifies the class, for example {"pipeline_stage": 0}
    ledger: Ledger  # the rank's allocations
    # returns the device memory outside the allocated blocks; its first call may run an allocator replay
    memory: Callable[[], DeviceMemory]
    host: Ledger | None = None  # the rank's allocations in host memory; None if the run keeps nothing there

    @property
    def reserved_bytes(self) -> int | None:
        """Peak bytes reserved by the PyTorch allocator."""
        return self.memory().reserved_bytes

    @property
    def device_bytes(self) -> int | None:
        """Device memory in bytes, as nvidia-smi shows it; None without a GPU."""
        return self.memory().device_bytes

    @property
    def outside(self) -> OutsideMemory:
        """Device memory outside the allocated blocks."""
        return self.memory().outside


@dataclass(frozen=True, slots=True)
class LargestBatchAndContext:
    """The largest batch and context that fit the GPU, one at a time; 0 if not even 1 fits."""

    batch_size: int  # with the run's context length
    context_length: int  # prompt tokens with the run's batch size, plus the run's number of new tokens
    all_positions: bool  # whether the model's maximum number of positions limits the context


@dataclass(frozen=True, slots=True)
class Generation:
    """Size of the KV cache: bytes of one sequence, over all layers, on one tensor-parallel rank."""

    bytes_per_token: int  # at the start of a sequence; a full sliding window does not grow any more
    bytes_per_sequence: int  # at the end of the context
    # finds the largest batch and context that fit; None without a GPU
    search: Callable[[], LargestBatchAndContext] | None = None

    @property
    def largest(self) -> LargestBatchAndContext | None:
        """The largest batch and context that fit, found by allocator replays; None without a GPU."""
        return None if self.search is None else self.search()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The memory of each class of ranks in a run; `ranks[0]` is the headline, the rank that needs most."""

    source: Source  # the command's kind of run
    device: str | None  # an emulated or real device; None for an estimate
    parameters: int  # number of elements; tied parameters count once
    trainable_parameters: int  # number of elements
    buffer_elements: int  # number of elements in the model's buffers
    ranks: tuple[RankResult, ...]  # one for each class of identical ranks, the largest need first
    confidence: Confidence  # the method that reserved memory is based on
    gpu: GpuSpec | None  # the GPU, if given
    limits: tuple[Limit, ...]  # memory and features that the figures omit
    notes: tuple[str, ...] = field(default=())  # options that were accepted but have no effect here
    # the verdict; None without a GPU, and before `Result.completion` completes an estimate
    judgement: Verdict | None = None

    @property
    def headline(self) -> RankResult:
        """The rank that needs the most memory."""
        return self.ranks[0]

    @property
    def ledger(self) -> Ledger:
        """The ledger of the headline rank."""
        return self.headline.ledger

    @property
    def not_modelled(self) -> tuple[str, ...]:
        """Descriptions of what the figures omit."""
        return tuple(limit.feature for limit in self.limits)

    @property
    def decision(self) -> Verdict | None:
        """The verdict with the interval it is based on; None without a GPU."""
        return self.judgement

    @property
    def verdict(self) -> Answer | None:
        """`fits`, `does-not-fit` or `unknown`; None without a GPU."""
        return None if self.decision is None else self.decision.answer

    @property
    def interval(self) -> Interval | None:
        """The expected range of device memory, from the errors of recorded runs of this kind; None without a GPU."""
        return None if self.decision is None else self.decision.interval

    @property
    def fits(self) -> bool | None:
        """Whether the headline rank fits the GPU; None if that is unknown, or without a GPU."""
        return None if self.decision is None else self.decision.fits

    @property
    def headroom_bytes(self) -> int | None:
        """The limit minus device memory of the headline rank; negative if the run does not fit."""
        device_bytes = self.headline.device_bytes
        return None if self.limit_bytes is None or device_bytes is None else self.limit_bytes - device_bytes

    @property
    def limit_bytes(self) -> int | None:
        """Memory limit of the run in bytes: usable memory of its GPU, or the limit of a check; None without either."""
        if self.decision is not None:
            return self.decision.limit_bytes
        return None if self.gpu is None else self.gpu.usable_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleResult(Sizing):
    """The result of running a module, which has no configuration.

    Args:
        name: where the module was defined, for example "model.py:make_model".
        step: what ran, for the screen, for example "training with adamw".
    """

    name: str
    step: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Sizing, NotebookDisplay):
    """The result of a run that has a configuration.

    An estimate may be lazy: `ranks` are computed from formulas at once. The allocator replay runs when `replayed` or a
    value that depends on it (reserved memory, device memory, the verdict) is first read.
    """

    spec: Spec
    textbook: Textbook | None  # None for models that the published formulas do not cover
    generation: Generation | None = None  # inference only
    completion: Callable[[], Result] | None = None  # returns this result with the allocator replay and its verdict

    def __repr__(self) -> str:
        """Return the peak and the verdict in one line, because the whole ledger is too long."""
        ledger = self.replayed.ledger
        unit: Unit = "GiB" if ledger.peak_bytes >= 2**30 else "MiB"
        peak = f"peak {format_bytes(ledger.peak_bytes, unit)} in {ledger.peak_phase}"
        where = "" if self.gpu is None else f"; {self.gpu.name}: {self.verdict}"
        return f"<Result {harmless(self.spec.name)}: {peak}{where}>"

    @property
    def name(self) -> str:
        """The name of the configuration."""
        return self.spec.name

    @property
    def replayed(self) -> Result:
        """This result after the allocator replay; its ledger counts bytes per block, as the allocator does."""
        return self if self.completion is None else self.completion()

    @property
    def decision(self) -> Verdict | None:
        """The verdict with the interval it is based on; None without a GPU."""
        return self.replayed.judgement
