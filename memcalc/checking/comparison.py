"""Two results beside each other."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.ledger.component import Component
from memcalc.ledger.result import Result


class Line(NamedTuple):
    """One quantity in both results. Bytes; None where a result has no such quantity."""

    name: str
    a: int | None
    b: int | None

    @property
    def difference(self) -> int | None:
        """B less A."""
        return None if self.a is None or self.b is None else self.b - self.a


class Difference(NamedTuple):
    """What differs between two results: components at each one's own peak, totals, and phases."""

    a: Result
    b: Result
    components: tuple[Line, ...]  # sum to the allocated peaks
    totals: tuple[Line, ...]  # allocated, reserved, device
    phases: tuple[Line, ...]


def compare(a: Result, b: Result) -> Difference:
    """The difference between two results' headline ranks."""
    at_a, at_b = (result.ledger.components(result.ledger.peak_phase) for result in (a, b))
    components = [
        Line(component.value, at_a.get(component, 0), at_b.get(component, 0))
        for component in Component
        if component in at_a or component in at_b
    ]
    totals = (
        Line("allocated", a.ledger.peak_bytes, b.ledger.peak_bytes),
        Line("reserved", a.headline.reserved_bytes, b.headline.reserved_bytes),
        Line("device", a.headline.device_bytes, b.headline.device_bytes),
    )
    names = dict.fromkeys([*a.ledger.phases, *b.ledger.phases])
    phases = [Line(name, a.ledger.totals.get(name), b.ledger.totals.get(name)) for name in names]
    return Difference(a, b, tuple(components), totals, tuple(phases))
