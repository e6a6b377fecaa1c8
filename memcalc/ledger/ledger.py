"""The ledger and its views: every total, breakdown and peak that memcalc reports is a sum of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from memcalc.ledger.component import Component
from memcalc.ledger.row import Row


class Rows:
    """A group of ledger rows with its sums. A group that many ranks share (model states) is summed once.

    Args:
        rows: the rows, or a function that returns them, which is called when a row or a component is first read.
        totals: bytes by phase, if known before the rows.
    """

    def __init__(
        self, rows: Iterable[Row] | Callable[[], Iterable[Row]], totals: Mapping[str, int] | None = None
    ) -> None:
        self._rows = rows
        self._totals = totals

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows."""
        return tuple(self._rows() if callable(self._rows) else self._rows)

    @cached_property
    def totals(self) -> Mapping[str, int]:
        """Bytes by phase; a phase without rows may be omitted."""
        if self._totals is not None:
            return self._totals
        found: dict[str, int] = {}
        for (phase, _), amount in self.sums.items():
            found[phase] = found.get(phase, 0) + amount
        return found

    @cached_property
    def sums(self) -> dict[tuple[str, Component], int]:
        """Bytes by phase and component."""
        alike: dict[tuple[Component, tuple[str, ...]], int] = {}
        for row in self.rows:
            group = (row.component, row.phases)
            alike[group] = alike.get(group, 0) + row.bytes
        table: dict[tuple[str, Component], int] = {}
        for (component, phases), amount in alike.items():
            for phase in phases:
                key = (phase, component)
                table[key] = table.get(key, 0) + amount
        return table


class Ledger:
    """The ledger of one rank: its rows, and the phases they refer to.

    Args:
        groups: the rows, in one or more groups.
        phases: every phase of the run, in order.
    """

    def __init__(self, groups: Sequence[Rows], phases: tuple[str, ...]) -> None:
        self.groups = groups
        self.phases = phases

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """All rows of all groups."""
        return tuple(row for group in self.groups for row in group.rows)

    @cached_property
    def components_by_phase(self) -> dict[str, dict[Component, int]]:
        """Bytes per component at the peak of each phase; a component without bytes is omitted."""
        table: dict[str, dict[Component, int]] = {phase: {} for phase in self.phases}
        for group in self.groups:
            for (phase, component), amount in group.sums.items():
                column = table[phase]
                column[component] = column.get(component, 0) + amount
        return table

    @cached_property
    def totals(self) -> dict[str, int]:
        """Allocated bytes at the peak of each phase."""
        return {phase: sum(group.totals.get(phase, 0) for group in self.groups) for phase in self.phases}

    @cached_property
    def peak_phase(self) -> str:
        """The phase with the highest peak; the first one if several are equal."""
        return max(self.phases, key=self.totals.__getitem__)

    @property
    def peak_bytes(self) -> int:
        """Allocated bytes at the peak of the run."""
        return self.totals[self.peak_phase]

    def components(self, phase: str) -> dict[Component, int]:
        """Return bytes by component at the peak of a phase, in the order of `Component`, without zeros."""
        column = self.components_by_phase[phase]
        return {component: column[component] for component in Component if column.get(component)}

    def live_rows(self, phase: str, component: Component | None = None) -> list[Row]:
        """Return the rows that are live at the peak of a phase, largest first."""
        rows = (row for row in self.rows if phase in row.phases and component in (None, row.component))
        return sorted(rows, key=lambda row: -row.bytes)
