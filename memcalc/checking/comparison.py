"""Comparison of results: two configurations, or one configuration estimated, traced and measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from memcalc.jupyter import NotebookDisplay
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger, Rows
from memcalc.ledger.result import DeviceMemory, OutsideMemory, Result, known
from memcalc.units import whole_number

STEADY_STEP = 2  # an estimate has the first step, and this one for all later steps
CUDA_ONLY = (Component.LIBRARY_WORKSPACE, Component.BLOCK_ROUNDING)


class ComparisonLine(NamedTuple):
    """One quantity in all results, in bytes; None where a result does not have it."""

    name: str
    sizes: tuple[int | None, ...]  # in the order of the results

    def excess(self, one: int, other: int) -> int | None:
        """Return the bytes by which result `one` exceeds result `other`."""
        size, base = self.sizes[one], self.sizes[other]
        return None if size is None or base is None else size - base

    @property
    def a(self) -> int | None:
        """Bytes in the first result."""
        return self.sizes[0]

    @property
    def b(self) -> int | None:
        """Bytes in the second result."""
        return self.sizes[1]

    @property
    def difference(self) -> int | None:
        """Bytes in the second result minus bytes in the first."""
        return self.excess(1, 0)


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(NotebookDisplay):
    """Differences between results: components at each result's peak, totals, and phases."""

    results: tuple[Result, ...]
    components: tuple[ComparisonLine, ...]  # they sum to the allocated peaks
    totals: tuple[ComparisonLine, ...]  # allocated, reserved, device
    phases: tuple[ComparisonLine, ...]
    without_cuda: bool = False  # estimates omit what only CUDA has, because a result is from a CPU

    def __repr__(self) -> str:
        """Return the compared results in one line."""
        return f"<Comparison of {', '.join(map(repr, self.results))}>"

    @property
    def a(self) -> Result:
        """The first result."""
        return self.results[0]

    @property
    def b(self) -> Result:
        """The second result."""
        return self.results[1]


def compare(*results: Result) -> Comparison:
    """Return the comparison of the results' headline ranks.

    If one of them is from a CPU, estimates omit the workspaces and the block rounding that only CUDA has.
    """
    on_cpu = any(_on_cpu(result) for result in results)
    if on_cpu:
        results = tuple(_without_cuda(result) if result.source == "estimate" else result for result in results)
    ledgers = [result.ledger for result in results]
    peaks = [ledger.components(ledger.peak_phase) for ledger in ledgers]
    components = [
        ComparisonLine(component.value, tuple(peak.get(component, 0) for peak in peaks))
        for component in Component
        if any(component in peak for peak in peaks)
    ]
    totals = (
        ComparisonLine("allocated", tuple(ledger.peak_bytes for ledger in ledgers)),
        ComparisonLine("reserved", tuple(result.headline.reserved_bytes for result in results)),
        ComparisonLine("device", tuple(result.headline.device_bytes for result in results)),
    )
    phases = [ComparisonLine(name, tuple(_at(ledger, name) for ledger in ledgers)) for name in _union(ledgers)]
    return Comparison(results, tuple(components), totals, tuple(phases), on_cpu)


def largest_differences(comparison: Comparison, one: int, other: int) -> list[tuple[str, ComparisonLine]]:
    """Return, for each component in which results `one` and `other` differ, the phase with the largest difference.

    Returns:
        phases and lines, the largest difference first; the first phase if several differ equally.
    """
    ledgers = [result.ledger for result in comparison.results]
    largest: dict[Component, tuple[str, ComparisonLine]] = {}
    for phase in (line.name for line in comparison.phases):
        names = [_phase_of(ledger, phase) for ledger in ledgers]
        columns = [None if name is None else led.components(name) for led, name in zip(ledgers, names, strict=True)]
        for component in Component:
            line = ComparisonLine(component.value, tuple(None if c is None else c.get(component, 0) for c in columns))
            before = largest.get(component)
            if abs(line.excess(one, other) or 0) > (0 if before is None else abs(before[1].excess(one, other) or 0)):
                largest[component] = (phase, line)
    return sorted(largest.values(), key=lambda item: -abs(item[1].excess(one, other) or 0))


def steady_phase(phase: str) -> str:
    """Return the estimate's phase that corresponds to a phase of a longer run: "forward_7" is "forward_2"."""
    name, _, step = phase.rpartition("_")
    return f"{name}_{STEADY_STEP}" if (whole_number(step) or 0) > STEADY_STEP else phase


def _phase_of(ledger: Ledger, phase: str) -> str | None:
    """Return the ledger's phase of this name, else that of the steady step; None: it has neither."""
    return next((name for name in (phase, steady_phase(phase)) if name in ledger.totals), None)


def _at(ledger: Ledger, phase: str) -> int | None:
    name = _phase_of(ledger, phase)
    return None if name is None else ledger.totals[name]


def _union(ledgers: Iterable[Ledger]) -> list[str]:
    return list(dict.fromkeys(phase for ledger in ledgers for phase in ledger.phases))


def _on_cpu(result: Result) -> bool:
    return result.device is not None and result.device.endswith("cpu")


def _without_cuda(result: Result) -> Result:
    """Return the result without CUDA workspaces and block rounding."""
    ledger = result.ledger
    kept = Ledger([Rows(row for row in ledger.rows if row.component not in CUDA_ONLY)], ledger.phases)
    headline = replace(result.headline, ledger=kept, memory=known(DeviceMemory(None, None, OutsideMemory(0, 0, 0))))
    return replace(result, ranks=(headline, *result.ranks[1:]))
