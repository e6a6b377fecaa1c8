"""Results of a grid: arrays with one entry per configuration."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from memcalc.spec.spec import Spec
from memcalc.sweeping.arrays import COMPONENTS
from memcalc.sweeping.grid import Grid, Value
from memcalc.sweeping.reasons import Reasons
from memcalc.sweeping.verdict_terms import ANSWERS, CLOSE, FITS, Verdicts, VerdictTerms, of_each

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

TOO_LARGE = (
    "It needs more than 1 PiB per GPU, the limit of `memcalc sweep`. Use `memcalc estimate` for this configuration."
)


@dataclass(frozen=True, slots=True)
class AllocatedPeaks:
    """Allocated bytes of the rank with the highest peak (the headline of `memcalc.estimate`); 0 where invalid."""

    phases: tuple[str, ...]  # names of the phases
    peak_bytes: Integers  # bytes at the peak. [n]
    peak_phase: Integers  # index of the peak's phase. [n]
    pipeline_stage: Integers  # the stage with the highest peak. [n]
    phase_bytes: Integers  # bytes at the peak of each phase. [n, phases]
    component_bytes: Integers  # bytes by component at the peak. [n, components]
    ledger_bytes: Integers | None  # bytes by phase and component, if requested. [n, phases, components]


@dataclass(frozen=True, slots=True)
class GridVerdicts:
    """Reserved and device memory, and the verdict."""

    # bytes reserved by the PyTorch allocator: from a replay where `replayed`, else the allocated peak times the median
    # ratio of recorded runs of its kind. [n]
    reserved_bytes: Integers
    # reserved memory plus the CUDA context and the communication library; without a GPU, no context. [n]
    device_bytes: Integers
    usable_bytes: Integers  # bytes of the GPU that a process can use; -1: no GPU was given. [n]
    verdict: Verdicts  # index into `ANSWERS`: fits, close or does not fit; -1: invalid, or no GPU was given. [n]
    replayed: Flags  # whether reserved memory and the verdict come from an allocator replay (replays.py). [n]
    numbers: npt.NDArray[np.int32]  # index of each configuration's terms before any replay. [n]
    terms: tuple[VerdictTerms, ...]  # the terms by their index

    def copy(self) -> GridVerdicts:
        """Return a copy that can be changed independently."""
        return replace(
            self,
            reserved_bytes=self.reserved_bytes.copy(),
            device_bytes=self.device_bytes.copy(),
            verdict=self.verdict.copy(),
            replayed=self.replayed.copy(),
        )


def _field(part: str, name: str) -> Any:
    return property(attrgetter(f"{part}.{name}"), doc=f"See `{part.capitalize()}`.")


@dataclass(frozen=True)
class Table:
    """The results of some configurations of a grid, numbered from `start`.

    Args:
        grid: the configurations.
        start: index of the first configuration of the table.
        valid: whether the configuration violates no rule and needs at most 1 PiB per GPU. [n]
        too_large: whether it needs more than 1 PiB per GPU. [n]
        allocated: allocated memory; its fields are also attributes of the table.
        judgement: whether it fits; its fields are also attributes of the table.
        invalid: why the other configurations are invalid.
    """

    grid: Grid
    start: int
    valid: Flags
    too_large: Flags
    allocated: AllocatedPeaks
    judgement: GridVerdicts
    invalid: Reasons

    components = COMPONENTS
    answers = ANSWERS

    phases = _field("allocated", "phases")
    peak_bytes = _field("allocated", "peak_bytes")
    peak_phase = _field("allocated", "peak_phase")
    pipeline_stage = _field("allocated", "pipeline_stage")
    phase_bytes = _field("allocated", "phase_bytes")
    component_bytes = _field("allocated", "component_bytes")
    ledger_bytes = _field("allocated", "ledger_bytes")
    reserved_bytes = _field("judgement", "reserved_bytes")
    device_bytes = _field("judgement", "device_bytes")
    usable_bytes = _field("judgement", "usable_bytes")
    verdict = _field("judgement", "verdict")
    replayed = _field("judgement", "replayed")

    def __repr__(self) -> str:
        """Return the numbers of all and of valid configurations, in one line."""
        return f"<Table of {len(self):,} configurations: {int(self.valid.sum()):,} valid>"

    def __len__(self) -> int:
        """Return the number of configurations."""
        return len(self.valid)

    @property
    def possible(self) -> Flags:
        """Whether each configuration violates no rule, regardless of its size. [n]"""
        return self.valid | self.too_large

    @property
    def headroom_bytes(self) -> Integers:
        """Usable memory of the GPU minus device memory; 0 where invalid. [n]

        Raises:
            ValueError: no GPU was given.
        """
        self._require_gpu()
        return np.where(self.valid, self.usable_bytes - self.device_bytes, 0)

    @property
    def fits(self) -> Flags:
        """Whether each configuration is valid and certain to fit into the GPU's usable memory. [n]

        Raises:
            ValueError: no GPU was given.
        """
        self._require_gpu()
        found: Flags = self.verdict == FITS
        return found

    @property
    def close(self) -> Flags:
        """Whether neither the bounds nor a replay decided. [n]

        Raises:
            ValueError: no GPU was given.
        """
        self._require_gpu()
        found: Flags = self.verdict == CLOSE
        return found

    def _require_gpu(self) -> None:
        if (self.usable_bytes[self.valid] < 0).any():
            raise ValueError("no GPU was given")

    @property
    def can_replay(self) -> Flags:
        """Whether an allocator replay can determine the reserved memory of each valid configuration. [n]"""
        replays = [each.replays for each in self.judgement.terms]
        found: Flags = self.valid & of_each(replays, self.judgement.numbers)
        return found

    def terms(self, chosen: Flags) -> list[VerdictTerms]:
        """Return the distinct terms of some configurations before any replay, the most frequent first.

        Args:
            chosen: whether each configuration is included. [n]
        """
        terms = self.judgement.terms
        counts = np.bincount(self.judgement.numbers[chosen], minlength=len(terms))
        return [terms[number] for number in np.argsort(-counts, kind="stable").tolist() if counts[number]]

    def point(self, index: int) -> dict[str, Value]:
        """Return the values of one configuration by the full names of their fields."""
        return self.grid.point(self.start + index)

    def spec(self, index: int) -> Spec:
        """Return one configuration, loaded.

        Raises:
            InputError: the configuration is invalid.
        """
        return self.invalid.spec(index)

    def reason(self, index: int) -> str:
        """Return why one configuration has no results: the error message of its estimate; "" if it has results."""
        if self.too_large[index]:
            return TOO_LARGE
        return "" if self.valid[index] else self.invalid.of(index)

    def reasons(self) -> Counter[str]:
        """Return the number of excluded configurations by reason.

        Configurations of one context that violate the same rule share the message of the first of them.
        """
        found = self.invalid.counts()
        if self.too_large.any():
            found[TOO_LARGE] = int(self.too_large.sum())
        return found

    def every_reason(self) -> list[str]:
        """Return the reason of each configuration, as `reason` does, but faster. [n]"""
        found = self.invalid.all()
        for index in np.flatnonzero(self.too_large).tolist():
            found[index] = TOO_LARGE
        return found
