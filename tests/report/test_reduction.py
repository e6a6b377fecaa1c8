"""A report stays below its size: details are omitted in a fixed order, peaks stay, and the report lists the omissions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memcalc.errors import NotWritten
from memcalc.report.html import html_report
from memcalc.report.html.html_report import MOST_BYTES, report_page, write_report
from memcalc.report.views.reduction import reductions
from memcalc.report.views.sections import group, list_section, view

WEIGHTS, LOGITS = [10, 20, 30, 40, 50, 60], [0, 5, 90, 0, 2, 1]


def timeline(times: int = 1) -> dict[str, Any]:
    """A timeline of 6 points, or several of them one after the other."""
    count = len(WEIGHTS) * times
    return {
        "kind": "timeline",
        "formulas": {"weights": [{"phases": ["forward"], "text": "2·P"}]},
        "document": {
            "points": {
                "begin": [2 * at for at in range(count)],
                "event": [2 * at + 1 for at in range(count)],
                "allocated_bytes": [a + b for a, b in zip(WEIGHTS, LOGITS, strict=True)] * times,
                "reserved_bytes": [100, 120, 120, 130, 110, 100] * times,
                "component_bytes": {"weights": WEIGHTS * times, "logits": LOGITS * times},
            }
        },
    }


def checked(runs: int, comfortable: int, points: int = 600) -> dict[str, Any]:
    """A report as `check --html` writes it: a table, then runs, the last of which fit comfortably."""
    rows = [[f"configs/{number}.yaml", "fits"] for number in range(runs)]
    table = {"kind": "table", "rows": rows, "strong": [0, runs - 1], "columns": []}
    each = [
        view(f"configs/{number}.yaml", [*list_section("Notes", ["a note"]), timeline(points // 6)])
        | {"comfortable": number >= runs - comfortable}
        for number in range(runs)
    ]
    return view("Configs checked", [table, group("Configs", each, folded=True)])


def timelines(found: dict[str, Any]) -> list[int]:
    """The runs that have one."""
    runs = next(section["views"] for section in found["sections"] if section["kind"] == "views")
    return [at for at, run in enumerate(runs) if run["sections"][-1]["kind"] == "timeline"]


def said(found: dict[str, Any]) -> str:
    """Return the line that lists the omitted parts."""
    return str(found["sections"][0]["lines"][0]["text"])


def test_the_whole_view_comes_first_and_is_not_changed() -> None:
    whole = checked(4, 2)
    before = json.dumps(whole)
    first, *_ = steps = [*reductions(whole)]
    assert first is whole
    assert json.dumps(whole) == before
    assert len(steps) > 10


def test_details_are_omitted_in_order_the_last_runs_first() -> None:
    steps = reductions(checked(40, 16))
    next(steps)
    found = next(steps)
    assert timelines(found) == [*range(38)]  # an eighth of the 16 that fit comfortably
    assert said(found) == "Omitted to keep this file small: timelines of 2 runs that fit with much memory free."
    for _ in range(7):
        found = next(steps)
    assert timelines(found) == [*range(24)]
    assert "timelines of 16 runs that fit with much memory free" in said(found)
    found = next(steps)
    assert timelines(found) == [*range(24)]
    assert said(found).endswith("memory free; timeline points, all but 300 per run.")
    texts = [said(found) for found in steps]
    order = [
        next(at for at, text in enumerate(texts) if word in text)
        for word in ("formulas", "timelines of 24 runs", "details of 5 runs", "rows")
    ]
    assert order == sorted(order)


def test_each_step_is_smaller() -> None:
    sizes = [len(json.dumps({**found, "sections": found["sections"][-2:]})) for found in reductions(checked(40, 16))]
    assert sizes == sorted(sizes, reverse=True)


def test_merged_points_are_the_peaks_of_their_intervals() -> None:
    """Six points, a hundred times: two of each three are merged away, so that 300 of 600 have each pair's higher one."""
    found = next(found for found in reductions(checked(1, 0)) if "all but 300" in str(found["sections"][0]))
    points = found["sections"][-1]["views"][0]["sections"][-1]["document"]["points"]
    assert points["begin"][:4] == [0, 4, 8, 12]
    assert points["allocated_bytes"][:4] == [25, 120, 61, 25]  # max(10, 25), max(120, 40), max(52, 61), and again
    assert points["event"][:4] == [3, 5, 11, 15]
    assert points["reserved_bytes"][:4] == [120, 130, 110, 120]
    assert points["component_bytes"] == {"weights": [20, 30, 60] * 100, "logits": [5, 90, 1] * 100}


def test_strong_rows_beyond_the_first_are_omitted_too() -> None:
    *_, last = reductions(checked(40, 0))
    table = last["sections"][1]
    assert len(table["rows"]) == 10
    assert table["strong"] == [0]


@pytest.mark.parametrize(
    ("runs", "comfortable"), [(1, 0), (30, 30), (300, 100), pytest.param(5000, 4000, marks=pytest.mark.long)]
)
def test_a_report_is_never_larger(tmp_path: Path, runs: int, comfortable: int) -> None:
    path = tmp_path / "report.html"
    write_report(path, checked(runs, comfortable, points=60 if runs > 300 else 600))
    page = path.read_bytes()
    assert len(page) <= MOST_BYTES
    assert (b"Omitted" in page) == (runs > 30)
    assert f"configs/{runs - 1}.yaml".encode() in page or runs == 5000  # in the table


def test_no_more_is_omitted_than_necessary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = checked(8, 8)
    sizes = [len(report_page(found).encode()) for found in reductions(whole)]
    monkeypatch.setattr(html_report, "MOST_BYTES", sizes[3])
    path = tmp_path / "report.html"
    write_report(path, whole)
    assert path.stat().st_size == sizes[3]


def test_a_report_that_cannot_be_small_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    with pytest.raises(NotWritten, match="at most 1,000,000 bytes"):
        write_report(path, view("x" * MOST_BYTES, []))
    assert not path.exists()
