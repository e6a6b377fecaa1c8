"""What every verb that sizes a run returns: one object with raw bytes, which all reports read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from memcalc.ledger.ledger import Ledger
from memcalc.spec.cards import Card
from memcalc.spec.spec import Spec

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


@dataclass(frozen=True, slots=True)
class RankResult:
    """One kind of rank: the ranks of a pipeline stage are alike."""

    rank: dict[str, int]  # {"pipeline_stage": 0, ...}
    ledger: Ledger
    reserved_bytes: int | None
    device_bytes: int | None
    outside: Outside
    host: Ledger | None = None  # what the rank holds of the host's memory, where the run puts something there


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


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to "what will each GPU hold?"; `ranks[0]` is the headline, the worst of them."""

    source: Source
    device: str | None
    spec: Spec
    parameters: int
    trainable_parameters: int
    buffer_elements: int
    textbook: Textbook
    ranks: tuple[RankResult, ...]
    confidence: Confidence
    card: Card | None
    not_modelled: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())  # options that were accepted but have no effect here
    generation: Generation | None = None  # of inference

    @property
    def headline(self) -> RankResult:
        """The rank that needs most."""
        return self.ranks[0]

    @property
    def ledger(self) -> Ledger:
        """The ledger of the headline rank."""
        return self.headline.ledger

    @property
    def fits(self) -> bool | None:
        """Whether the worst rank's device memory is within the card's usable memory; None without a card."""
        headroom = self.headroom_bytes
        return None if headroom is None else headroom >= 0

    @property
    def headroom_bytes(self) -> int | None:
        """Usable memory of the card less device memory of the worst rank; negative when it does not fit."""
        if self.card is None or self.headline.device_bytes is None:
            return None
        return self.card.usable_bytes - self.headline.device_bytes
