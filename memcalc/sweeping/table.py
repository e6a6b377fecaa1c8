"""What a grid of configurations comes to: arrays with one entry a configuration."""

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
from memcalc.sweeping.terms import ANSWERS, CLOSE, FITS, Terms, Verdicts, of_each

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

TOO_LARGE = "It needs more than 1 PiB of one GPU, the most that a grid holds; `memcalc estimate` sizes it by itself."


@dataclass(frozen=True, slots=True)
class Allocated:
    """What the ranks that need most allocate (the headline of `memcalc.estimate`). Bytes, zeros where invalid.

    Args:
        phases: names of the phases.
        peak_bytes: at the peak. [n]
        peak_phase: the number of its phase. [n]
        pipeline_stage: the stage that needs most. [n]
        phase_bytes: at the peak of each phase. [n, phases]
        component_bytes: by component at the peak. [n, components]
        ledger_bytes: by phase and component, if it was asked for. [n, phases, components]
    """

    phases: tuple[str, ...]
    peak_bytes: Integers
    peak_phase: Integers
    pipeline_stage: Integers
    phase_bytes: Integers
    component_bytes: Integers
    ledger_bytes: Integers | None


@dataclass(frozen=True, slots=True)
class Judgement:
    """How configurations are judged.

    Args:
        reserved_bytes: what PyTorch's allocator holds: by its replay where `replayed`, else the allocated peak times
            the median ratio of recorded runs of its kind. [n]
        device_bytes: reserved, the context, the communication library; without a card, reserved and the library. [n]
        usable_bytes: what a process can use of the card; -1: none was named. [n]
        verdict: numbers of `ANSWERS`: it fits, is close or does not fit; -1: it is invalid, or no card was named. [n]
        replayed: whether an allocator replay gave its reserved memory and its verdict (replays.py). [n]
        numbers: of the terms by which each was judged before any replay. [n]
        terms: by number.
    """

    reserved_bytes: Integers
    device_bytes: Integers
    usable_bytes: Integers
    verdict: Verdicts
    replayed: Flags
    numbers: npt.NDArray[np.int32]
    terms: tuple[Terms, ...]

    def copy(self) -> Judgement:
        """One that can be changed without changing this one."""
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
        start: the number of the first configuration in here.
        valid: whether it is in here: its rules hold, and it needs no more than a pebibyte of one GPU. [n]
        too_large: whether it needs more. [n]
        allocated: what it allocates. Its fields can be read from the table, too.
        judgement: whether it fits. So can its fields.
        invalid: why others are invalid.
    """

    grid: Grid
    start: int
    valid: Flags
    too_large: Flags
    allocated: Allocated
    judgement: Judgement
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

    def __len__(self) -> int:
        """How many configurations are in here."""
        return len(self.valid)

    @property
    def possible(self) -> Flags:
        """Whether its rules hold, however large it is. [n]"""
        return self.valid | self.too_large

    @property
    def headroom_bytes(self) -> Integers:
        """Usable memory of the card less device memory, the best estimate of it; 0 where it is invalid. [n]

        Raises:
            ValueError: no card was named.
        """
        self._require_card()
        return np.where(self.valid, self.usable_bytes - self.device_bytes, 0)

    @property
    def fits(self) -> Flags:
        """Whether each configuration is valid and certain to be within the card's usable memory. [n]

        Raises:
            ValueError: no card was named.
        """
        self._require_card()
        found: Flags = self.verdict == FITS
        return found

    @property
    def close(self) -> Flags:
        """Whether neither the bounds nor a replay of each decided. [n]

        Raises:
            ValueError: no card was named.
        """
        self._require_card()
        found: Flags = self.verdict == CLOSE
        return found

    def _require_card(self) -> None:
        if (self.usable_bytes[self.valid] < 0).any():
            raise ValueError("no card was named")

    @property
    def can_replay(self) -> Flags:
        """Whether an allocator replay can say what each valid configuration reserves. [n]"""
        replays = [each.replays for each in self.judgement.terms]
        found: Flags = self.valid & of_each(replays, self.judgement.numbers)
        return found

    def terms(self, chosen: Flags) -> list[Terms]:
        """By which some configurations were judged before any replay, each once, the most frequent first.

        Args:
            chosen: whether each is one of them. [n]
        """
        terms = self.judgement.terms
        counts = np.bincount(self.judgement.numbers[chosen], minlength=len(terms))
        return [terms[number] for number in np.argsort(-counts, kind="stable").tolist() if counts[number]]

    def point(self, index: int) -> dict[str, Value]:
        """The values of one configuration by the full names of their fields."""
        return self.grid.point(self.start + index)

    def spec(self, index: int) -> Spec:
        """One configuration, loaded.

        Raises:
            InputError: it is invalid.
        """
        return self.invalid.spec(index)

    def reason(self, index: int) -> str:
        """Why one configuration is not in here: the message that loading it gives; "" where it is."""
        if self.too_large[index]:
            return TOO_LARGE
        return "" if self.valid[index] else self.invalid.of(index)

    def reasons(self) -> Counter[str]:
        """Every reason, and how many configurations it excludes; most frequent first in `most_common`.

        Configurations that differ in their batches alone and break the same rule have the reason of the first of them.
        """
        found = self.invalid.counts()
        if self.too_large.any():
            found[TOO_LARGE] = int(self.too_large.sum())
        return found

    def every_reason(self) -> list[str]:
        """Why each configuration is not in here, as `reason` says it, and sooner; "" where it is. [n]"""
        found = self.invalid.all()
        for index in np.flatnonzero(self.too_large).tolist():
            found[index] = TOO_LARGE
        return found
