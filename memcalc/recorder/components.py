"""Component of each storage.

Tensors that the run knows are marked: weights, gradients, optimizer states, inputs, logits. The others follow from
their lifetime. A storage allocated in forward and live when forward ends was saved for backward: an activation. A
storage that does not outlive its phase is a temporary. After the last layer both count as logits and loss, as in the
estimate.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc.ledger.component import Component
from memcalc.recorder.attribution import DistributedRole, OperatorLocation
from memcalc.recorder.storages import Number

# A later mark does not change these: a tied weight, a gradient that the optimizer also holds.
FIRST_COME = frozenset({Component.WEIGHTS, Component.LIBRARY_WORKSPACE, Component.INPUTS})

GENERATION = ("prefill", "decode")  # phases of step/generation.py, without their numbers


class StorageOrigin(NamedTuple):
    """Where and when a storage was allocated."""

    phase_name: str  # phase without its number: "forward"
    place: OperatorLocation


class StorageComponents:
    """The component of every storage, settled at the end of the run."""

    def __init__(self) -> None:
        self._births: dict[Number, StorageOrigin] = {}
        self._marked: dict[Number, Component] = {}
        self._here: dict[Number, None] = {}  # allocated in the current phase, and live
        self._outlived: set[Number] = set()

    def begin_phase(self, name: str) -> None:
        """Forget live storages of earlier phases; forward and loss count as one phase, since both save for backward."""
        if not name.startswith("loss"):
            self._here.clear()

    def end_phase(self) -> None:
        """Record that the live storages of the current phase have outlived it."""
        self._outlived.update(self._here)

    def born(self, number: Number, phase: str, place: OperatorLocation) -> None:
        """Record that a storage was allocated."""
        self._births[number] = StorageOrigin(phase.rpartition("_")[0] or phase, place)
        self._here[number] = None

    def freed(self, number: Number) -> None:
        """Record that a storage was freed."""
        self._here.pop(number, None)

    def mark(self, number: Number, component: Component) -> None:
        """Set the component of a storage."""
        before = self._marked.get(number)
        if before not in FIRST_COME:
            self._marked[number] = component

    def marked(self, number: Number) -> Component | None:
        """Return the component set for a storage so far; None if none was set."""
        return self._marked.get(number)

    def settled(self) -> dict[Number, Component]:
        """Return every storage's component."""
        return {number: self._marked.get(number) or self._of(number, birth) for number, birth in self._births.items()}

    def _of(self, number: Number, birth: StorageOrigin) -> Component:
        if birth.phase_name in ("forward", "loss", "backward") and self._is_buffer(number, birth):
            return Component.COMMUNICATION_BUFFERS
        if birth.phase_name in GENERATION:
            return Component.LOGITS_AND_LOSS if birth.place.after_layers else Component.TEMPORARIES
        if birth.phase_name not in ("forward", "loss", "backward"):
            return Component.TEMPORARIES
        if birth.phase_name == "loss" or birth.place.after_layers:
            return Component.LOGITS_AND_LOSS
        if birth.place.recomputed or birth.phase_name == "forward":
            return Component.ACTIVATIONS if number in self._outlived else Component.TEMPORARIES
        return Component.TEMPORARIES

    def _is_buffer(self, number: Number, birth: StorageOrigin) -> bool:
        """Return whether a storage is a communication buffer; a gathered input saved for backward is an activation."""
        if birth.place.role is DistributedRole.COLLECTIVE:
            kept = birth.phase_name != "backward" or birth.place.recomputed
            return not (kept and number in self._outlived)
        return birth.place.role is DistributedRole.ENGINE
