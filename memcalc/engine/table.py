"""What a grid of configurations comes to: arrays with one entry a configuration."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memcalc.engine.grid import Grid, Value
from memcalc.engine.pruned import Pruned
from memcalc.engine.terms import ANSWERS, CLOSE, FITS, Numbers, Terms, Verdicts, of_each
from memcalc.estimation.items import PHASES
from memcalc.ledger.component import Component
from memcalc.spec.broken import Broken
from memcalc.spec.spec import Spec

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

COMPONENTS = tuple(Component)

TOO_LARGE = "It needs more than 1 PiB of one GPU, the most that a grid holds; `memcalc estimate` sizes it by itself."


@dataclass(frozen=True, slots=True)
class Table:
    """The results of some configurations of a grid, numbered from `start`; zeros where one was pruned.

    Bytes are those of the rank that needs most (the headline of `memcalc.estimate`), as int64.

    Args:
        grid: the configurations.
        start: the number of the first configuration in here.
        valid: whether it is in here: its rules hold, and it needs no more than a pebibyte of one GPU. [n]
        too_large: whether it needs more. [n]
        peak_bytes: allocated at the peak. [n]
        peak_phase: the number of the phase of the peak, in `phases`. [n]
        pipeline_stage: the stage that needs most. [n]
        reserved_bytes: what PyTorch's allocator holds: by its replay where `replayed`, else the allocated peak times
            the median ratio of recorded runs of its kind. [n]
        device_bytes: reserved, the context, the communication library; without a card, reserved and the library. [n]
        usable_bytes: what a process can use of the card; -1: none was named. [n]
        verdict: numbers of `answers`: it fits, is close or does not fit; -1: it is invalid, or no card was named. [n]
        replayed: whether an allocator replay gave its reserved memory and its verdict (replays.py). [n]
        phase_bytes: allocated at the peak of each phase. [n, phases]
        component_bytes: by component at the peak; sums to `peak_bytes`. [n, components]
        ledger_bytes: by phase and component, if it was asked for; sums to `phase_bytes`. [n, phases, components]
    """

    grid: Grid
    start: int
    valid: Flags
    too_large: Flags
    peak_bytes: Integers
    peak_phase: Integers
    pipeline_stage: Integers
    reserved_bytes: Integers
    device_bytes: Integers
    usable_bytes: Integers
    verdict: Verdicts
    replayed: Flags
    phase_bytes: Integers
    component_bytes: Integers
    ledger_bytes: Integers | None
    _pruned: Pruned
    _numbers: Numbers
    _terms: tuple[Terms, ...]

    phases = PHASES
    components = COMPONENTS
    answers = ANSWERS

    def __len__(self) -> int:
        """How many configurations are in here."""
        return len(self.valid)

    @property
    def possible(self) -> Flags:
        """Whether its rules hold, however large it is. [n]"""
        return self.valid | self.too_large

    @property
    def headroom_bytes(self) -> Integers:
        """Usable memory of the card less device memory, the best estimate of it; 0 where it was pruned. [n]

        Raises:
            ValueError: no card was named.
        """
        if (self.usable_bytes[self.valid] < 0).any():
            raise ValueError("no card was named")
        return np.where(self.valid, self.usable_bytes - self.device_bytes, 0)

    @property
    def fits(self) -> Flags:
        """Whether each configuration is valid and certain to be within the card's usable memory. [n]

        Raises:
            ValueError: no card was named.
        """
        return self._answered(FITS)

    @property
    def close(self) -> Flags:
        """Whether neither the bounds nor a replay of each decided. [n]

        Raises:
            ValueError: no card was named.
        """
        return self._answered(CLOSE)

    def _answered(self, answer: int) -> Flags:
        if (self.usable_bytes[self.valid] < 0).any():
            raise ValueError("no card was named")
        found: Flags = self.verdict == answer
        return found

    @property
    def can_replay(self) -> Flags:
        """Whether an allocator replay can say what each valid configuration reserves. [n]"""
        found: Flags = self.valid & of_each([each.replays for each in self._terms], self._numbers)
        return found

    def terms(self, chosen: Flags) -> list[Terms]:
        """By which some configurations were judged before any replay, each once, the most frequent first.

        Args:
            chosen: whether each is one of them. [n]
        """
        counts = np.bincount(self._numbers[chosen], minlength=len(self._terms))
        return [self._terms[number] for number in np.argsort(-counts, kind="stable").tolist() if counts[number]]

    def point(self, index: int) -> dict[str, Value]:
        """The values of one configuration by the full names of their fields."""
        return self.grid.point(self.start + index)

    def spec(self, index: int) -> Spec:
        """One configuration, loaded.

        Raises:
            InputError: it was pruned.
        """
        return self._pruned.points.spec(self.start + index)

    def reason(self, index: int) -> str:
        """Why one configuration was pruned: the message that loading it gives; "" where it was not."""
        if self.too_large[index]:
            return TOO_LARGE
        return "" if self.valid[index] else self._pruned.reason(self.start + index)

    def reasons(self) -> Counter[str]:
        """Every reason, and how many configurations it pruned; most frequent first in `most_common`.

        Configurations that differ in their batches alone and break the same rule have the reason of the first of them.
        """
        found: Counter[str] = Counter()
        for _, members in self._pruned.alike(self.start + np.flatnonzero(~self.possible), worded=False):
            found[self._pruned.reason(int(members[0]))] += len(members)
        if self.too_large.any():
            found[TOO_LARGE] = int(self.too_large.sum())
        return found

    def every_reason(self) -> list[str]:
        """Why each configuration was pruned, as `reason` says it, and sooner; "" where it was not. [n]"""
        found = np.full(len(self), "", dtype=object)
        known: dict[Broken, str] = {}
        for broken, members in self._pruned.alike(self.start + np.flatnonzero(~self.possible), worded=True):
            reason = None if broken is None else known.get(broken)
            if reason is None:
                reason = self._pruned.reason(int(members[0]))
            if broken is not None:
                known[broken] = reason
            found[members - self.start] = reason
        found[self.too_large] = TOO_LARGE
        return found.tolist()
