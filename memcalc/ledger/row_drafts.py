"""Rows before the ledger is written: tensors, and a bit mask of the phases in which they are live."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from memcalc.ledger.component import Component
from memcalc.ledger.row import Row
from memcalc.spec.spec import Spec

SETUP_PHASES = ("model", "optimizer", "input")
STEP_PHASES = ("zero_grad", "forward", "loss", "backward", "optimizer_step")


def phase_names(steps: int) -> tuple[str, ...]:
    """Return all phases of a run of `steps` optimizer steps.

    They are "model", "optimizer", "input", "zero_grad_1", ..., "optimizer_step_<steps>".
    """
    return SETUP_PHASES + tuple(f"{phase}_{step}" for step in range(1, steps + 1) for phase in STEP_PHASES)


STEPS = 2  # the first step, and the steady state of all later steps

PHASES = phase_names(STEPS)
EVALUATION = "evaluation"  # after the last step, in a run that evaluates
GENERATION = "generation"  # of completions that it trains on, in a run that makes them itself
ALL_PHASES = (*PHASES, EVALUATION, GENERATION)
BIT = {phase: 1 << index for index, phase in enumerate(ALL_PHASES)}


def mask_of(*phases: str) -> int:
    """Return the bits of some phases."""
    bits = 0
    for phase in phases:
        bits |= BIT[phase]
    return bits


def from_phase(first: str) -> int:
    """Return the bits of a phase and all later ones."""
    return (1 << len(ALL_PHASES)) - BIT[first]


def run_phases(spec: Spec) -> tuple[str, ...]:
    """Return the phases of a run in the order of their bits; "" in place of one that it does not have."""
    training = spec.training
    if training.completion_length is not None:
        return (*PHASES, "" if training.evaluation_batch_size is None else EVALUATION, GENERATION)
    return PHASES if training.evaluation_batch_size is None else (*PHASES, EVALUATION)


@lru_cache(maxsize=4096)
def phases_of(mask: int, phases: tuple[str, ...] = PHASES) -> tuple[str, ...]:
    """Return the phases of a mask, in order."""
    return tuple(phase for bit, phase in enumerate(phases) if phase and mask >> bit & 1)


class RowDraft(NamedTuple):
    """A ledger row with its phases as a bit mask.

    Args:
        component: the component that it counts for.
        module: its module.
        tensor: its name within the module.
        shape: its shape, in elements.
        dtype: its dtype.
        count: number of such tensors.
        each: requested bytes of one tensor.
        block: bytes of the allocator block of one tensor.
        mask: bits of the phases in which it is live, see `BIT`.
        formula: `each` in symbols.
        citation: its source.
    """

    component: Component
    module: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    count: int  # type: ignore[assignment] # hides tuple.count, which no item needs
    each: int
    block: int
    mask: int
    formula: str
    citation: str

    def row(self, count: int, mask: int, phases: tuple[str, ...] = PHASES) -> Row:
        """Return the finished row for `count` such tensors, in those `phases` that `mask` contains."""
        return Row(
            self.component,
            self.module,
            self.tensor,
            self.shape,
            self.dtype,
            count,
            count * self.each,
            phases_of(mask, phases),
            self.formula,
            self.citation,
        )
