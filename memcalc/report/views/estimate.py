"""The view of one run: the verdict, three numbers against the GPU, the timeline, and the peak opened into formulas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memcalc.ledger.component import Component
from memcalc.ledger.result import Result
from memcalc.report.labels import label, meaning, percent, rank_text, shortened
from memcalc.report.plots.palette import OUTSIDE, color
from memcalc.report.screen import Column, TextTable
from memcalc.report.screens.verdict import assumed, because, error_bars, figures, limit_text, subject, verdict
from memcalc.report.tables.breakdown import breakdown, host_grid
from memcalc.report.tables.explanation import chapters
from memcalc.report.tables.phases import rank_grid
from memcalc.report.tables.textbook import generation_grid, textbook_grid
from memcalc.report.views.sections import Section, list_section, table_section, view
from memcalc.text import harmless
from memcalc.units import Unit, format_bytes, format_number
from memcalc.verdict.reasons import Reason


def estimate_view(result: Result, sections: list[Section]) -> dict[str, Any]:
    """Return the view of a run, from its `estimate_sections`."""
    return view(subject(result).run, sections)


def estimate_sections(
    result: Result,
    unit: Unit,
    more: Iterable[Section] = (),
    *,
    reason: Reason | None = None,
    advice: str = "",
    largest: bool = True,
) -> list[Section]:
    """Return the sections of one run, the verdict first.

    Args:
        result: the run.
        unit: of memory.
        more: sections that follow the peak memory, such as the timeline.
        reason: the reason of the verdict, if it was searched for.
        advice: the command to try next.
        largest: search the largest batch and context of a generation, which takes seconds.
    """
    host = host_grid(result, unit)
    tables = [rank_grid(result, unit)] if len(result.ranks) > 1 else []
    tables += [host] if host is not None else []
    published = None if result.generation else textbook_grid(result, unit)
    tables += [published] if published is not None else []
    return [
        verdict_section(result, unit, reason, advice),
        bars_section(result, unit),
        *more,
        components_section(result, unit),
        phases_table(result, unit),
        *map(table_section, tables),
        *([generation_section(result, unit, largest=largest)] if result.generation else []),
        *list_section("Notes", map(shortened, result.notes)),
        *list_section("Not modelled", result.not_modelled),
    ]


def verdict_section(result: Result, unit: Unit, reason: Reason | None = None, advice: str = "") -> Section:
    """Return the verdict with its interval, the reason, and the changes that fit if they were searched."""
    lines = [assumed(result, unit), error_bars(result, unit), because(reason, unit) if reason else "", advice]
    return {
        "kind": "verdict",
        "subject": [harmless(line) for line in subject(result).lines],
        "answer": result.verdict,
        "text": harmless(verdict(result, unit)),
        "lines": [harmless(line) for line in lines if line],
    }


def bars_section(result: Result, unit: Unit) -> Section:
    """Device, reserved and allocated memory against the GPU, with the interval of device memory."""
    headline, interval = result.headline, result.interval
    sizes = {
        "device": headline.device_bytes,
        "reserved": headline.reserved_bytes,
        "allocated": result.ledger.peak_bytes,
    }
    meanings = {row[0]: row[-1] for row in figures(result, unit).rows}
    return {
        "kind": "bars",
        "title": "Peak memory",
        "limit": None
        if result.limit_bytes is None
        else {"bytes": result.limit_bytes, "text": limit_text(result, unit)},
        "bars": [
            {"name": name, "bytes": size, "text": format_bytes(size, unit), "note": meanings[name]}
            for name, size in sizes.items()
            if size is not None
        ],
        "interval": None if interval is None else [interval.low_bytes, interval.high_bytes],
    }


def generation_section(result: Result, unit: Unit, *, largest: bool) -> Section:
    """Return the section of a generation's KV cache; see `estimate_sections`."""
    return table_section(generation_grid(result, unit, largest=largest)) | {"place": "generation"}


def components_section(result: Result, unit: Unit) -> Section:
    """Return the section of the peak's components, each with its rows, formulas and sources."""
    parts, ledger = breakdown(result), result.ledger
    whole = sum(parts.inside.values()) + sum(parts.outside.values())
    where = rank_text(result.headline.rank) if len(result.ranks) > 1 else ""
    rows = [
        {
            "label": label(name),
            "color": color(Component(name)) if name in parts.inside else OUTSIDE,
            "bytes": size,
            "text": format_bytes(size, unit),
            "share": percent(size, whole),
            "meaning": meaning(name),
            "groups": _groups(result, name, unit) if name in parts.inside else [],
        }
        for name, size in (parts.inside | parts.outside).items()
    ]
    return {
        "kind": "components",
        "title": f"At the peak: {ledger.peak_phase}{f', {where}' if where else ''}",
        "total": {"name": "device" if parts.outside else "allocated", "text": format_bytes(whole, unit)},
        "rows": rows,
    }


def phases_table(result: Result, unit: Unit) -> Section:
    """Return the peak of each phase, with its fraction of the overall peak."""
    ledger = result.ledger
    rows = [(phase, format_number(ledger.totals[phase], unit)) for phase in ledger.phases]
    strong = frozenset({ledger.phases.index(ledger.peak_phase)})
    grid = TextTable("Phases", (Column("phase"), Column(f"peak allocated, {unit}", right=True)), rows, strong)
    shares = [ledger.totals[phase] / ledger.peak_bytes if ledger.peak_bytes else 0.0 for phase in ledger.phases]
    return table_section(grid) | {"shares": [round(share, 4) for share in shares]}


def _groups(result: Result, component: str, unit: Unit) -> list[dict[str, Any]]:
    """Return the rows of a component that are live at the peak."""
    return [
        {
            "phases": group.phases,
            "source": group.citation,
            "entries": [
                {"what": harmless(entry.description), "size": entry.size, "formula": entry.formula}
                for entry in group.entries
            ],
        }
        for chapter in chapters(result, component, unit, at_peak=True)
        for group in chapter.groups
    ]
