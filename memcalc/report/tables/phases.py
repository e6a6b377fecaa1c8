"""The phases of the run, each with what it holds; and the pipeline stages, each with its peak."""

from __future__ import annotations

from itertools import groupby

from memcalc.ledger.result import RankResult, Sizing
from memcalc.report.screen import Column, TextTable, numeric, small_bar
from memcalc.units import Unit, format_number

_BAR_WIDTH = 32
PEAK_MARK = "<- peak"


def phase_grid(result: Sizing, unit: Unit) -> TextTable:
    """Allocated bytes at the peak of each phase."""
    ledger = result.ledger
    rows = []
    for phase in ledger.phases:
        bar = small_bar(ledger.totals[phase], ledger.peak_bytes, _BAR_WIDTH)
        mark = f" {PEAK_MARK}" if phase == ledger.peak_phase else ""
        rows.append((phase, format_number(ledger.totals[phase], unit), bar + mark))
    columns = (Column("phase"), Column(unit, right=True), Column("peak allocated"))
    return TextTable("Phases", columns, rows, frozenset({ledger.phases.index(ledger.peak_phase)}))


def rank_grid(result: Sizing, unit: Unit) -> TextTable:
    """One line for each type of rank, or for consecutive stages with equal figures; the one that needs most marked."""
    ordered = sorted(result.ranks, key=lambda rank_result: tuple(rank_result.rank.values()))
    axes = list(result.headline.rank)
    columns = [Column(axis.removeprefix("pipeline_"), right=True) for axis in axes] + [
        Column("peak in"),
        *numeric("allocated", "reserved", "device"),
        Column(""),
    ]
    rows: list[tuple[str, ...]] = []
    strong = 0
    for figures, alike in groupby(ordered, lambda each: _rank_figures(result, each, unit)):
        kinds = [tuple(each.rank.values()) for each in alike]
        names = zip(kinds[0], kinds[-1], strict=True)
        strong = len(rows) if tuple(result.headline.rank.values()) in kinds else strong
        rows.append((*(str(a) if a == b else f"{a} to {b}" for a, b in names), *figures))
    return TextTable(f"Pipeline stages, in {unit}", tuple(columns), rows, frozenset({strong}))


def _rank_figures(result: Sizing, rank_result: RankResult, unit: Unit) -> tuple[str, ...]:
    words = []
    if result.gpu is not None and rank_result.device_bytes is not None:
        words.append("fits" if rank_result.device_bytes <= result.gpu.usable_bytes else "does not fit")
    if rank_result is result.headline and len(result.ranks) > 1:
        words.append("<- most")
    return (
        rank_result.ledger.peak_phase,
        format_number(rank_result.ledger.peak_bytes, unit),
        "-" if rank_result.reserved_bytes is None else format_number(rank_result.reserved_bytes, unit),
        "-" if rank_result.device_bytes is None else format_number(rank_result.device_bytes, unit),
        " ".join(words),
    )
