"""What each storage is for.

What the run can name is marked (weights, gradients, states, inputs, logits). The rest tells itself by when it is made
and when it dies: made in forward and alive when forward is over, it was kept for backward: activations. What does not
outlive its phase is a temporary. Behind the last layer, both belong to logits and loss, as in the estimate.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc.ledger.component import Component
from memcalc.recorder.places import Place, Spread
from memcalc.recorder.storages import Number

# What is marked later does not change what these are: a tied weight, a gradient that the optimizer holds too.
FIRST_COME = frozenset({Component.WEIGHTS, Component.LIBRARY_WORKSPACE, Component.INPUTS})

GENERATION = ("prefill", "decode")  # the phases of step/generation.py, by their kinds


class Birth(NamedTuple):
    """Where and when a storage was made."""

    kind: str  # of the phase: "forward"
    place: Place


class Purposes:
    """The component of every storage, settled at the end of the run."""

    def __init__(self) -> None:
        self._births: dict[Number, Birth] = {}
        self._marked: dict[Number, Component] = {}
        self._here: dict[Number, None] = {}  # made in the phase that runs, and alive
        self._outlived: set[Number] = set()

    def begin_phase(self, name: str) -> None:
        """Forgets what earlier phases left alive: forward and loss are one, since what both make waits for backward."""
        if not name.startswith("loss"):
            self._here.clear()

    def end_phase(self) -> None:
        """What was made since the phase began and is alive has outlived it."""
        self._outlived.update(self._here)

    def born(self, number: Number, phase: str, place: Place) -> None:
        """A storage was made."""
        self._births[number] = Birth(phase.rpartition("_")[0] or phase, place)
        self._here[number] = None

    def died(self, number: Number) -> None:
        """A storage's last owner let it go."""
        self._here.pop(number, None)

    def mark(self, number: Number, component: Component) -> None:
        """The run names a storage."""
        before = self._marked.get(number)
        if before not in FIRST_COME:
            self._marked[number] = component

    def marked(self, number: Number) -> Component | None:
        """What the run has named a storage, so far."""
        return self._marked.get(number)

    def settled(self) -> dict[Number, Component]:
        """Every storage's component."""
        return {number: self._marked.get(number) or self._of(number, birth) for number, birth in self._births.items()}

    def _of(self, number: Number, birth: Birth) -> Component:
        if birth.kind in ("forward", "loss", "backward") and self._is_buffer(number, birth):
            return Component.COMMUNICATION_BUFFERS
        if birth.kind in GENERATION:
            return Component.LOGITS_AND_LOSS if birth.place.tail else Component.TEMPORARIES
        if birth.kind not in ("forward", "loss", "backward"):
            return Component.TEMPORARIES
        if birth.kind == "loss" or birth.place.tail:
            return Component.LOGITS_AND_LOSS
        if birth.place.recomputed or birth.kind == "forward":
            return Component.ACTIVATIONS if number in self._outlived else Component.TEMPORARIES
        return Component.TEMPORARIES

    def _is_buffer(self, number: Number, birth: Birth) -> bool:
        """Whether it is there to be sent or received; a layer's gathered input that waits for backward is more."""
        if birth.place.spread is Spread.COLLECTIVE:
            kept = birth.kind != "backward" or birth.place.recomputed
            return not (kept and number in self._outlived)
        return birth.place.spread is Spread.ENGINE
