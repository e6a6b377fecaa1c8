"""The phases of the run, each with what it holds; and the pipeline stages, each with its peak."""

from __future__ import annotations

from itertools import groupby

from memcalc.ledger.result import RankResult, Sizing
from memcalc.report.bar import small_bar
from memcalc.report.grid import Column, TextTable
from memcalc.units import Unit, format_number

_BAR_WIDTH = 32
_PEAK = "<- peak"


def phase_grid(result: Sizing, unit: Unit) -> TextTable:
    """Allocated bytes at the peak of each phase."""
    ledger = result.ledger
    rows = []
    for phase in ledger.phases:
        bar = small_bar(ledger.totals[phase], ledger.peak_bytes, _BAR_WIDTH)
        mark = f" {_PEAK}" if phase == ledger.peak_phase else ""
        rows.append((phase, format_number(ledger.totals[phase], unit), bar + mark))
    columns = (Column("phase"), Column(unit, right=True), Column("peak allocated"))
    return TextTable("Phases", columns, rows, frozenset({ledger.phases.index(ledger.peak_phase)}))


def rank_grid(result: Sizing, unit: Unit) -> TextTable:
    """One line for each type of rank, or for consecutive stages with equal figures; the one that needs most marked."""
    ordered = sorted(result.ranks, key=lambda kind: tuple(kind.rank.values()))
    axes = list(result.headline.rank)
    columns = [Column(axis.removeprefix("pipeline_"), right=True) for axis in axes] + [
        Column("peak in"),
        Column("allocated", right=True),
        Column("reserved", right=True),
        Column("device", right=True),
        Column(""),
    ]
    rows: list[tuple[str, ...]] = []
    strong = 0
    for figures, alike in groupby(ordered, lambda kind: _rank_figures(result, kind, unit)):
        kinds = [tuple(kind.rank.values()) for kind in alike]
        names = zip(kinds[0], kinds[-1], strict=True)
        strong = len(rows) if tuple(result.headline.rank.values()) in kinds else strong
        rows.append((*(str(a) if a == b else f"{a} to {b}" for a, b in names), *figures))
    return TextTable(f"Pipeline stages, in {unit}", tuple(columns), rows, frozenset({strong}))


def _rank_figures(result: Sizing, kind: RankResult, unit: Unit) -> tuple[str, ...]:
    words = []
    if result.card is not None and kind.device_bytes is not None:
        words.append("fits" if kind.device_bytes <= result.card.usable_bytes else "does not fit")
    if kind is result.headline and len(result.ranks) > 1:
        words.append("<- most")
    return (
        kind.ledger.peak_phase,
        format_number(kind.ledger.peak_bytes, unit),
        "-" if kind.reserved_bytes is None else format_number(kind.reserved_bytes, unit),
        "-" if kind.device_bytes is None else format_number(kind.device_bytes, unit),
        " ".join(words),
    )
