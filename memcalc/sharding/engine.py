"""The hooks that a sharding engine has around the units of a model: its layers, and the root, which has all else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memcalc.estimation.choice import Choice
from memcalc.estimation.engines.fsdp2 import is_embedding
from memcalc.estimation.sharding import Held, Parameters
from memcalc.stream.requests import Requests

# Layers are units by their number; the root has embeddings, final norm and LM head, unless the ends are units.
ROOT, EMBEDDING, TAIL = -1, -2, -3


class Gradient(NamedTuple):
    """A gradient that autograd has produced: the storage, and its parameter (None: of no known one)."""

    storage: int
    parameter: Held | None


class Engine:
    """One GPU alone: weights are resident, gradients stay where autograd puts them.

    Subclasses say what PyTorch or DeepSpeed allocate around units, in the order of their sources.

    Args:
        requests: where they are written.
    """

    keeps_gradients = True  # whether gradients stay as autograd made them, and a later micro-batch is added to them
    hooks_gradients = False  # whether it takes each gradient as soon as its operator's backward has ended
    hooks_modules = False  # whether it has hooks around each module that has parameters, not only around units
    wraps_ends = False  # whether the embedding is a unit, and final norm and LM head are one
    output_is_loss = False  # whether the loss is part of the forward of the root
    repeats = True  # whether micro-batches and steps but for the first ask for the same, and drop what they are given
    scales_output_gradient = False  # whether a hook replaces the gradient of the model's output by a scaled one

    def __init__(self, requests: Requests) -> None:
        self.requests = requests

    @property
    def has_unsharded_gradients(self) -> bool:
        """Whether gradients of earlier micro-batches are there that no engine has reduced."""
        return False

    def wrap(self, weights: Sequence[int]) -> None:
        """Wrap the module, before the optimizer is built.

        Args:
            weights: the storages of all parameters, in registration order; the engine may replace them.
        """

    def updated(self, groups: Sequence[tuple[Parameters, Choice]]) -> Sequence[tuple[Parameters, Choice]]:
        """What the optimizer updates, given the parameters that train by their dtype."""
        return groups

    def prepare(self) -> None:
        """Before each micro-batch: what is done only once."""

    def begin(self, *, have_gradients: bool, last: bool) -> None:
        """Begin a micro-batch.

        Args:
            have_gradients: whether earlier ones have left gradients, to which it adds.
            last: whether the optimizer's step follows it.
        """

    def before_forward(self, unit: int) -> None:
        """Before a unit's forward; that of the root spans the whole forward."""

    def after_forward(self, unit: int) -> None:
        """After a unit's forward."""

    def before_backward(self, unit: int) -> None:
        """When the gradient of a unit's output has been produced."""

    def after_backward(self, unit: int, gradients: Sequence[Gradient]) -> list[int]:  # noqa: ARG002 -- for subclasses
        """When the gradient of a unit's input has been produced, and for the root at the end of backward.

        Args:
            unit: the unit.
            gradients: of its parameters, which the engine takes over.

        Returns:
            The storages of gradients that stay until `zero_grad`.
        """
        return [gradient.storage for gradient in gradients]

    def gradient_ready(self, gradient: Gradient) -> None:
        """When autograd has produced a gradient, if the engine hooks them; the engine takes it over."""
        raise NotImplementedError

    def after_last_backward(self, gradients: list[int]) -> list[int]:
        """After the backward of a step's last micro-batch, while the script still holds the loss and the logits.

        Args:
            gradients: the storages that stay, of all micro-batches.

        Returns:
            Those that still stay.
        """
        return gradients

    def before_module(self, unit: int, module: str, *, again: bool) -> None:
        """Before a module's forward or backward, if the engine hooks modules.

        Args:
            unit: that it is part of.
            module: its name in the unit.
            again: whether its forward runs again in backward.
        """

    def after_module(self) -> None:
        """After the forward or backward of the last module that was entered."""

    def before_step(self, gradients: list[int]) -> None:
        """Before the optimizer's step, which drops the gradients if the engine hooks them.

        Args:
            gradients: the storages that stay.
        """

    def before_update(self, number: int) -> None:
        """Before the update of one of the groups that `updated` has returned."""

    def after_update(self, number: int) -> None:
        """After it."""

    def after_step(self) -> None:
        """After the optimizer's step."""


def by_unit(ordered: Sequence[Held], layers: int, *, ends: bool = False) -> Mapping[int, tuple[Held, ...]]:
    """The parameters of each unit in the order in which modules register them.

    Args:
        ordered: all parameters, as `in_order` yields them.
        layers: how many layers there are.
        ends: whether the embedding is a unit, and final norm and LM head are one.
    """
    inside = [held for held in ordered if held.where == "layer"]
    units: dict[int, list[Held]] = {ROOT: []}
    for held in ordered:
        if held.where != "layer":
            own = EMBEDDING if is_embedding(held) else TAIL if held.where == "head" else ROOT
            units.setdefault(own if ends else ROOT, []).append(held)
    layer, seen, kind = -1, set[Held](), ""
    for held in inside:
        prefix = held.module.partition("*")[0]
        if held in seen or prefix != kind:  # the first parameter of the next layer
            layer, seen, kind = layer + 1, set(), prefix
        seen.add(held)
        units.setdefault(layer, []).append(held)
    assert layer + 1 == layers
    return {unit: tuple(found) for unit, found in units.items()}
