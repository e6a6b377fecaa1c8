"""What every verb that sizes a run returns: one object with raw bytes, which all reports read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from memcalc.jupyter import Displayed
from memcalc.ledger.ledger import Ledger
from memcalc.ledger.verdict import Answer, Interval, Verdict
from memcalc.spec.cards import Card
from memcalc.spec.limits import Limit
from memcalc.spec.spec import Spec
from memcalc.text import harmless
from memcalc.units import Unit, format_bytes

Source = Literal["estimate", "trace", "dry-run", "measure"]
Confidence = Literal["formula", "replay", "allocator", "measured"]


@dataclass(frozen=True, slots=True)
class Textbook:
    """The published closed forms, on one GPU without sharding. Bytes but for `parameters`."""

    parameters: int
    model_state_bytes: int
    activation_bytes: int
    bytes_per_parameter: int


@dataclass(frozen=True, slots=True)
class Outside:
    """Device memory that the process holds outside PyTorch's allocated blocks. Bytes."""

    cached_segments: int
    device_context: int
    communication_library: int


class DeviceMemory(NamedTuple):
    """What a rank holds of its device around its allocated peak. Bytes; None: not known.

    Args:
        reserved_bytes: the most that PyTorch's allocator holds.
        device_bytes: that, the context and the communication library; None without a card.
        outside: what lies around the allocated blocks.
    """

    reserved_bytes: int | None
    device_bytes: int | None
    outside: Outside


def known(memory: DeviceMemory) -> Callable[[], DeviceMemory]:
    """What a rank holds, where that is known already."""
    return lambda: memory


@dataclass(frozen=True, slots=True)
class RankResult:
    """One kind of rank: the ranks of a pipeline stage are identical.

    Args:
        rank: such as {"pipeline_stage": 0}.
        ledger: what it allocates.
        memory: returns what it holds around that; an allocator replay may run when it is first called.
        host: what the rank holds of the host's memory, where the run puts something there.
    """

    rank: dict[str, int]
    ledger: Ledger
    memory: Callable[[], DeviceMemory]
    host: Ledger | None = None

    @property
    def reserved_bytes(self) -> int | None:
        """The most that PyTorch's allocator holds."""
        return self.memory().reserved_bytes

    @property
    def device_bytes(self) -> int | None:
        """What nvidia-smi shows; None without a card."""
        return self.memory().device_bytes

    @property
    def outside(self) -> Outside:
        """What lies around the allocated blocks."""
        return self.memory().outside


@dataclass(frozen=True, slots=True)
class Largest:
    """What a card holds at most; one more of either does not fit. 0: not even 1 does."""

    batch_size: int  # with the context of the run
    context_length: int  # with its batch, and as many new tokens
    all_positions: bool  # whether the context ends where the model's positions do


@dataclass(frozen=True, slots=True)
class Generation:
    """The cache of keys and values in numbers: bytes of one sequence, over all layers, on one tensor-parallel rank.

    Args:
        bytes_per_token: of a sequence that has just begun: a window grows no further when it is full.
        bytes_per_sequence: at the end of its context.
        largest: what the card holds, where one is named.
    """

    bytes_per_token: int
    bytes_per_sequence: int
    largest: Largest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The answer to "what will each GPU hold?", of any run; `ranks[0]` is the headline, the worst of them."""

    source: Source
    device: str | None
    parameters: int
    trainable_parameters: int
    buffer_elements: int
    ranks: tuple[RankResult, ...]
    confidence: Confidence
    card: Card | None
    limits: tuple[Limit, ...]  # what the figures leave out
    notes: tuple[str, ...] = field(default=())  # options that were accepted but have no effect here
    judgement: Verdict | None = None  # None without a card, and where an estimate is completed later

    @property
    def headline(self) -> RankResult:
        """The rank that needs most."""
        return self.ranks[0]

    @property
    def ledger(self) -> Ledger:
        """The ledger of the headline rank."""
        return self.headline.ledger

    @property
    def not_modelled(self) -> tuple[str, ...]:
        """What the figures leave out, in words."""
        return tuple(limit.what for limit in self.limits)

    @property
    def decision(self) -> Verdict | None:
        """The verdict with what it rests on; None without a card."""
        return self.judgement

    @property
    def verdict(self) -> Answer | None:
        """Fits, does-not-fit or unknown; None without a card."""
        return None if self.decision is None else self.decision.answer

    @property
    def interval(self) -> Interval | None:
        """Where device memory lies, by recorded runs of this kind; None without a card."""
        return None if self.decision is None else self.decision.interval

    @property
    def fits(self) -> bool | None:
        """Whether the worst rank fits the card; None where that is unknown, and without a card."""
        return None if self.decision is None else self.decision.fits

    @property
    def headroom_bytes(self) -> int | None:
        """Usable memory of the card less device memory of the worst rank; negative when it does not fit."""
        device_bytes = self.headline.device_bytes
        return None if self.card is None or device_bytes is None else self.card.usable_bytes - device_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleResult(Sizing):
    """The result of a run of a module, which has no configuration.

    Args:
        name: where the module is from, such as "model.py:make_model".
        step: what ran, for the screen, such as "training with adamw".
    """

    name: str
    step: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Sizing, Displayed):
    """The result of a run of a configuration.

    An estimate can be made in two parts: `ranks` from formulas at once, and the allocator replay when `replayed`, or
    anything that follows from it (reserved and device memory, the verdict), is first read.
    """

    spec: Spec
    textbook: Textbook | None  # None for models that the published formulas do not describe
    generation: Generation | None = None  # of inference
    completion: Callable[[], Result] | None = None  # returns this result with the replay and its verdict

    def __repr__(self) -> str:
        """The peak and the verdict in one line: a ledger would fill pages."""
        ledger = self.replayed.ledger
        unit: Unit = "GiB" if ledger.peak_bytes >= 2**30 else "MiB"
        peak = f"peak {format_bytes(ledger.peak_bytes, unit)} in {ledger.peak_phase}"
        where = "" if self.card is None else f"; {self.card.name}: {self.verdict}"
        return f"<Result {harmless(self.spec.name)}: {peak}{where}>"

    @property
    def name(self) -> str:
        """The name of the configuration."""
        return self.spec.name

    @property
    def replayed(self) -> Result:
        """This result after the allocator replay: its ledger counts blocks as the allocator does."""
        return self if self.completion is None else self.completion()

    @property
    def decision(self) -> Verdict | None:
        """The verdict with what it rests on; None without a card."""
        return self.replayed.judgement
