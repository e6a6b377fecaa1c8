"""What a run needs of its device: bounds first, the allocator replay where they do not decide, else recorded runs."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor
from typing import NamedTuple

from memcalc.errors import OutOfMemory
from memcalc.estimation.estimate import Played
from memcalc.estimation.generation.sizing import allocated_bytes as generation_bytes
from memcalc.estimation.moving import peak_bytes
from memcalc.estimation.outside import outside_bytes
from memcalc.estimation.stages import stages_of, stages_that_matter
from memcalc.estimation.states import state_peak
from memcalc.ledger.verdict import Answer, Errors
from memcalc.rehearsal.rehearsal import requests_of, why_not
from memcalc.spec.cards import Card, find_card
from memcalc.spec.foreign import refuse_foreign
from memcalc.spec.spec import Spec
from memcalc.stream.requests import Replay, Requests, replay, reserved_upper_bound
from memcalc.verdict.kinds import kinds_of
from memcalc.verdict.recorded import replay_errors, reserve_ratio


class Need(NamedTuple):
    """What one run needs of its device. Bytes.

    Args:
        reserved_bytes: the best estimate of what the allocator holds at most; on a card that it fills, what it holds
            there, having freed cached blocks.
        errors: of recorded runs of its kind.
        outside_bytes: context and communication library.
        played: what the replay found beside the requests; None where the run was not replayed.
        on_card: whether the run gets through on its whole card, errors included; None without a card.
        gets_through: whether its replay does, errors aside; None without a card or a replay.
    """

    reserved_bytes: int
    errors: Errors
    outside_bytes: int
    played: Played | None
    on_card: Answer | None
    gets_through: bool | None

    @property
    def device_bytes(self) -> int:
        """The best estimate of device memory."""
        return self.reserved_bytes + self.outside_bytes

    @property
    def low_bytes(self) -> int:
        """The lower end of the interval of device memory."""
        return self.outside_bytes + floor(self.reserved_bytes * (1 + self.errors.low))

    @property
    def high_bytes(self) -> int:
        """The upper end of the interval of device memory."""
        return self.outside_bytes + ceil(self.reserved_bytes * (1 + self.errors.high))


def least_bytes(spec: Spec, card: Card | None, limit: int | None = None, *, tails: bool = False) -> int:
    """A lower bound of device memory: what the worst rank requests at once, its context and communication library.

    Args:
        spec: the run.
        card: its card, if it has one.
        limit: stop at the first stage that is beyond this: what is returned is then no maximum, but above it.
        tails: with the remainders of model states that formulas expect the allocator not to split off.

    Raises:
        InputError: there are no formulas for this family.
    """
    refuse_foreign(spec)
    outside = outside_bytes(spec, card)
    if spec.inference is not None:
        return outside + max(generation_bytes(spec, stage, card) for stage in stages_of(spec))
    stages = stages_that_matter(spec)
    most = max(state_peak(spec, stage) for stage in stages) + outside
    for stage in stages:
        if limit is not None and most > limit:
            break
        most = max(most, peak_bytes(spec, stage, card, tails=tails) + outside)
    return most


def can_replay(spec: Spec) -> bool:
    """Whether the order of all requests of the run is known.

    Raises:
        InputError: there are no formulas for this family.
    """
    refuse_foreign(spec)
    return spec.inference is None and not why_not(spec)


def need_of(spec: Spec, card: Card | None, allocated: int | None = None) -> Need:
    """The need of the rank that needs most, by replay where the run can be replayed.

    Args:
        spec: the run.
        card: its card, if it has one.
        allocated: its allocated peak, where that is known already.

    Returns:
        The need; its `played` is None where the run was not replayed.
    """
    found = _replayed(spec, card) if can_replay(spec) else None
    if found is not None:
        return found
    return recorded_need(spec, card, _allocated(spec, card) if allocated is None else allocated)


def recorded_need(spec: Spec, card: Card | None, allocated: int) -> Need:
    """The need of a rank that allocates so much, by what recorded runs of its kind reserved. Bytes."""
    ratio, errors = reserve_ratio(kinds_of(spec))
    outside = outside_bytes(spec, card)
    found = Need(ceil(allocated * ratio), errors, outside, None, None, None)
    # No run reserves less than it allocates.
    least = min(allocated / found.reserved_bytes - 1, 0.0) if found.reserved_bytes else 0.0
    found = found._replace(errors=errors._replace(low=max(errors.low, least)))
    return found if card is None else found._replace(on_card=answer_of(found, card.usable_bytes))


def gets_through(spec: Spec, card: Card) -> bool:
    """Whether the replay of a run gets through on its card, errors aside."""
    room, requests = card.usable_bytes - outside_bytes(spec, card), requests_of(spec)
    if not spec.training.alloc_conf and reserved_upper_bound(requests) <= room:
        return True  # proven for default settings, without a replay
    return _replays(spec, requests)(room) is not None


def _replays(spec: Spec, requests: Requests) -> Callable[[int | None], Replay | None]:
    """Returns the replay of a run on its card with so many bytes for the allocator; None: it runs out of memory."""
    training = spec.training
    capacity = None if spec.hardware.gpu is None else find_card(spec.hardware.gpu).usable_bytes

    def on(room: int | None) -> Replay | None:
        try:
            return replay(requests, training.alloc_conf, training.torch_version.removeprefix("v"), room, capacity)
        except OutOfMemory:
            return None

    return on


def answer_of(need: Need, limit: int) -> Answer:
    """Where a limit lies: above the interval, below it, or inside."""
    if need.high_bytes <= limit:
        return "fits"
    return "does-not-fit" if need.low_bytes > limit else "unknown"


def _allocated(spec: Spec, card: Card | None) -> int:
    if spec.inference is not None:
        return max(generation_bytes(spec, stage, card) for stage in stages_of(spec))
    return max(peak_bytes(spec, stage, card) for stage in stages_that_matter(spec))


def _replayed(spec: Spec, card: Card | None) -> Need | None:
    """The replay on the card, where the allocator frees cached blocks before it runs out of memory.

    None where the run needs more than the largest device on which the allocator is modelled with its settings.

    The replay's errors are a matter of reserved memory, so a run gets through for sure where it gets through on a
    device that is smaller by the largest error, and for sure not where one that is larger by it is not enough.
    """
    errors, outside = replay_errors(kinds_of(spec)), outside_bytes(spec, card)
    on = _replays(spec, requests_of(spec))
    room = None if card is None else card.usable_bytes - outside
    on_card = on(room)
    found = on_card or on(None)
    if found is None:
        return None
    need = Need(found.reserved_bytes, errors, outside, found.played, None, None)
    if card is None or room is None:
        return need
    if on_card is None:
        larger = floor(room / (1 + errors.low))
        perhaps = found.reserved_bytes <= larger or on(larger) is not None  # nothing is freed where all has room
        return need._replace(on_card="unknown" if perhaps else "does-not-fit", gets_through=False)
    sure = need.high_bytes <= card.usable_bytes or on(floor(room / (1 + errors.high))) is not None
    return need._replace(on_card="fits" if sure else "unknown", gets_through=True)
