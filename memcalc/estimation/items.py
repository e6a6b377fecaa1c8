"""Rows in the making: what is alive in which phases, as a bit mask, until the ledger is written."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from memcalc.ledger.component import Component
from memcalc.ledger.phases import phase_names
from memcalc.ledger.row import Row
from memcalc.spec.spec import Spec

STEPS = 2  # the first step, and the steady state that every later one repeats

PHASES = phase_names(STEPS)
EVALUATION = "evaluation"  # after the last step, in a run that evaluates
EVALUATED = (*PHASES, EVALUATION)
BIT = {phase: 1 << index for index, phase in enumerate(EVALUATED)}


def mask_of(*phases: str) -> int:
    """The bits of some phases."""
    bits = 0
    for phase in phases:
        bits |= BIT[phase]
    return bits


def from_phase(first: str) -> int:
    """The bits of a phase and all that follow it."""
    return (1 << len(EVALUATED)) - BIT[first]


def run_phases(spec: Spec) -> tuple[str, ...]:
    """The phases of a run."""
    return PHASES if spec.training.evaluation_batch_size is None else EVALUATED


@lru_cache(maxsize=4096)
def phases_of(mask: int, phases: tuple[str, ...] = PHASES) -> tuple[str, ...]:
    """The phases of a mask, in order."""
    return tuple(phase for bit, phase in enumerate(phases) if mask >> bit & 1)


class Item(NamedTuple):
    """A row with its phases as a mask. `each` is one tensor's bytes, `block` what the allocator hands out for it."""

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
        """The finished row, for `count` such tensors in those of `phases` that `mask` names."""
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
