"""Largest tensors at the peak, with the line of code that allocated them."""

from __future__ import annotations

from pathlib import PurePosixPath

from memcalc.events.groups import AllocationGroup, groups
from memcalc.events.memory_curve import MemoryCurve
from memcalc.report.grid import Column, TextTable
from memcalc.report.labels import percent
from memcalc.report.plots.palette import mark
from memcalc.units import Unit, format_number

SHOWN = 15


def tensor_grid(curve: MemoryCurve, unit: Unit, shown: int = SHOWN) -> TextTable:
    """Return the tensors live at the peak, identical ones in one row, largest first; the last rows sum up the rest."""
    found = groups(curve.live_at_peak())
    whole = sum(group.bytes for group in found)
    rows = [_row(group, whole, unit) for group in found[:shown]]
    rest = found[shown:]
    if rest:
        size, count = sum(group.bytes for group in rest), sum(group.count for group in rest)
        rows.append(("", format_number(size, unit), percent(size, whole), f"{count:,}", "smaller ones", "", ""))
    rows.append(("", format_number(whole, unit), "", f"{sum(g.count for g in found):,}", "requested, total", "", ""))
    phase = curve.phase_of(curve.peak_event)
    columns = (
        Column(""),
        Column(unit, right=True),
        Column("share", right=True),
        Column("count", right=True),
        Column("tensor", wrap=True),
        Column("module", wrap=True),
        Column("allocated by", wrap=True),
    )
    title = f"Largest at the peak{f', in {phase}' if phase else ''}"
    return TextTable(title, columns, rows, frozenset({len(rows) - 1}), letters=True)


def _row(group: AllocationGroup, whole: int, unit: Unit) -> tuple[str, ...]:
    return (
        mark(group.component),
        format_number(group.bytes, unit),
        percent(group.bytes, whole),
        f"{group.count:,}",
        f"{group.dtype}[{', '.join(map(str, group.shape))}]" if group.dtype else "-",
        group.module or "-",
        f"{group.operator.removeprefix('aten.')} {PurePosixPath(group.line).name}".strip() or "-",
    )
