"""Comparison of results: estimated, traced, on the null device, measured."""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.checking.comparison import Comparison, ComparisonLine, compare, largest_differences
from memcalc.ledger.result import Result
from memcalc.report.labels import label, shortened, signed_percent
from memcalc.report.screen import Column, Screen, TextTable, draw_grid, draw_line, draw_list
from memcalc.units import Unit, format_number

_SHARE = Column("%", right=True)


def source_label(result: Result) -> str:
    """Return the source of a result: "estimate", "fake", "null" or "measured"."""
    if result.source == "trace" and (result.device or "").startswith("null:"):
        return "null"
    return {"trace": "fake", "measure": "measured", "dry-run": "null"}.get(result.source, result.source)


class ComparisonLayout:
    """The layout of a comparison.

    Args:
        comparison: the results.
        labels: a word for each of them.
        reference: the position of the one that the others are measured against.
        unit: of the sizes.
        exact: whether differences are in bytes; else they are in the unit, too.
    """

    def __init__(
        self, comparison: Comparison, labels: Sequence[str], reference: int, unit: Unit, *, exact: bool = True
    ) -> None:
        self.comparison = comparison
        self.labels = labels
        self.reference = reference
        self.unit = unit
        self.exact = exact
        self.compared = [at for at in range(len(labels)) if at != reference]

    def components(self) -> list[TextTable]:
        """Return the components of each result at its own peak, and the totals."""
        totals = [line for line in self.comparison.totals if any(size is not None for size in line.sizes)]
        lines = [*(line._replace(name=label(line.name)) for line in self.comparison.components), *totals]
        strong = frozenset(range(len(self.comparison.components), len(lines)))
        results = zip(self.labels, self.comparison.results, strict=True)
        where = ", ".join(f"{word} in {result.ledger.peak_phase}" for word, result in results)
        return self._grids(f"At the peak: {where}", "component", lines, strong)

    def phases(self) -> list[TextTable]:
        """Return the peak of each phase."""
        return self._grids("Phases", "phase", self.comparison.phases)

    def largest_differences(self) -> list[TextTable]:
        """Return the largest difference of each result from the reference, by component."""
        return [grid for at in self.compared for grid in self._differences_from(at)]

    def _differences_from(self, other: int) -> list[TextTable]:
        found = largest_differences(self.comparison, other, self.reference)
        if not found:
            return []
        rows = [(phase, *self._cells(line._replace(name=label(line.name)), other)) for phase, line in found]
        sizes = [Column(self.labels[at], right=True) for at in self._shown(other)]
        how = "bytes apart" if self.exact else self._label(other)
        columns = (Column("phase"), Column("component", wrap=True), *sizes, Column(how, right=True), _SHARE)
        words = f"{self.labels[other]} and {self.labels[self.reference]}"
        return [TextTable(f"Largest differences of {words}, by component ({self.unit})", columns, rows)]

    def _grids(
        self, title: str, head: str, lines: Sequence[ComparisonLine], strong: frozenset[int] = frozenset()
    ) -> list[TextTable]:
        """One table; for more than two results the differences have a separate table."""
        if len(self.labels) == 2:
            (other,) = self.compared
            return [TextTable(title, self._columns(head, other), [self._cells(line, other) for line in lines], strong)]
        sizes = [(line.name, *(self._size(size) for size in line.sizes)) for line in lines]
        columns = (Column(head), *(Column(f"{word} {self.unit}", right=True) for word in self.labels))
        differences = [
            (line.name, *(cell for other in self.compared for cell in self._difference(line, other))) for line in lines
        ]
        heads = [cell for other in self.compared for cell in (Column(self._label(other), right=True), _SHARE)]
        how = f"Differences in {'bytes' if self.exact else self.unit}"
        return [TextTable(title, columns, sizes, strong), TextTable(how, (Column(head), *heads), differences, strong)]

    def _columns(self, head: str, other: int) -> tuple[Column, ...]:
        sizes = [Column(f"{self.labels[at]} {self.unit}", right=True) for at in self._shown(other)]
        how = "difference, bytes" if self.exact else self._label(other)
        return (Column(head, wrap=True), *sizes, Column(how, right=True), _SHARE)

    def _cells(self, line: ComparisonLine, other: int) -> tuple[str, ...]:
        sizes = [self._size(line.sizes[at]) for at in self._shown(other)]
        return (line.name, *sizes, *self._difference(line, other))

    def _shown(self, other: int) -> list[int]:
        return sorted([other, self.reference])

    def _label(self, other: int) -> str:
        return f"{self.labels[other]} - {self.labels[self.reference]}"

    def _size(self, size: int | None) -> str:
        return "-" if size is None else format_number(size, self.unit)

    def _difference(self, line: ComparisonLine, other: int) -> tuple[str, str]:
        """In bytes or in the unit, and as a share of the reference."""
        size, base = line.excess(other, self.reference), line.sizes[self.reference]
        if size is None or base is None:
            return "-", "-"
        sign = "+" if size > 0 else ""
        return f"{sign}{format_number(size, 'bytes' if self.exact else self.unit)}", signed_percent(size, base)


def comparison_grids(results: Sequence[Result], unit: Unit) -> list[TextTable]:
    """Return tables of results of one configuration, each compared with the last, the closest to a real run."""
    table = ComparisonLayout(compare(*results), [source_label(result) for result in results], len(results) - 1, unit)
    return [*table.components(), *table.phases(), *table.largest_differences()]


def draw_comparison(screen: Screen, results: Sequence[Result], unit: Unit) -> None:
    """Draw the tables, and the notes of the last result."""
    words = " and ".join(source_label(result) for result in results[:-1])
    each = ", each" if len(results) > 2 else ""
    draw_line(screen, f"Differences: {words}{each} less {source_label(results[-1])}.", 0)
    if compare(*results).without_cuda:
        draw_line(screen, "The estimate omits workspaces and block rounding, which exist only on CUDA.", 0)
    for grid in comparison_grids(results, unit):
        draw_grid(screen, grid)
    draw_list(screen, "Notes", map(shortened, results[-1].notes))
