"""The page: everything in one file, every number to be read."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from memcalc.errors import InputError, Unavailable
from memcalc.events import Event, EventType
from memcalc.events.memory_curve import MemoryCurve
from memcalc.ledger.component import Component
from memcalc.report.plots.files import write_plot
from memcalc.report.plots.html import curve_page
from memcalc.report.plots.markup import AxisMark, phase_marks, step_marks
from memcalc.report.plots.svg import HEIGHT, LEFT, TOP, WIDTH, round_step
from memcalc.report.screen import Column, TextTable
from tests.report.runs import MIB, asked_for, replayed, two_steps

SVG = "{http://www.w3.org/2000/svg}"


def svg(page: str) -> ET.Element:
    found = re.search(r"<svg.*?</svg>", page, re.DOTALL)
    assert found is not None
    return ET.fromstring(found[0])


def data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def words(element: ET.Element) -> list[str]:
    return [text.text or "" for text in element.iter(f"{SVG}text")]


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = curve_page(replayed(two_steps()), "tiny", "MiB")

    assert re.findall(r'(?:src|href)="|url\(|@import|https?://(?!www\.w3\.org/2000/svg)', page) == []
    assert re.findall(r"%[A-Z]+%", page) == []


def test_the_pointer_shows_every_byte() -> None:
    """78 events, one stretch each; the parts of each sum to its total."""
    found = data(curve_page(replayed(two_steps()), "tiny", "MiB"))
    peak = max(found["stretches"], key=lambda stretch: stretch[3])

    assert len(found["stretches"]) == found["events"] == 78
    assert all(sum(stretch[4]) == stretch[3] <= stretch[5] for stretch in found["stretches"])
    assert dict(zip(found["components"], peak[4], strict=True))["optimizer state"] == 192 * MIB
    assert peak[6:] == ["loss_2", "aten.mm lm_head model.py:30"]
    assert (found["unit"], found["unit_bytes"], found["decimals"], found["total"]) == ("MiB", MIB, 1, "allocated")


def test_shapes_reach_where_their_numbers_are() -> None:
    """Two events of 100 and 300 bytes: the first takes a third of the height, over the left half."""
    events = [
        Event(EventType.ALLOC, 1, 100, component=Component.WEIGHTS),
        Event(EventType.ALLOC, 2, 200, component=Component.ACTIVATIONS),
    ]
    element = svg(curve_page(asked_for(events), "two", "bytes"))
    shapes = {path.get("data-part"): path.get("d") for path in element.iter(f"{SVG}path") if path.get("data-part")}
    third, bottom = TOP + HEIGHT * 2 // 3, TOP + HEIGHT
    middle, end = LEFT + WIDTH // 2, LEFT + WIDTH

    assert shapes["weights"] == f"M{LEFT} {third}L{end} {third}L{end} {bottom}L{LEFT} {bottom}z"
    assert shapes["activations"] == (
        f"M{LEFT} {third}L{middle} {third}L{middle} {TOP}L{end} {TOP}L{end} {third}L{LEFT} {third}z"
    )


def test_the_peak_the_phases_and_the_steps_are_named() -> None:
    found = words(svg(curve_page(asked_for(two_steps()), "tiny", "MiB")))

    assert {"peak 516.0 MiB in loss_2", "forward", "backward", "setup", "step 1", "step 2", "MiB", "500"} <= set(found)


def test_the_end_of_the_gpu_is_a_line() -> None:
    near, far = (replace(asked_for(two_steps()), limit=size * MIB) for size in (500, 5000))

    assert "usable GPU memory" in words(svg(curve_page(near, "tiny", "MiB")))
    assert "usable GPU memory" not in words(svg(curve_page(far, "tiny", "MiB")))


def test_phases_without_room_tell_their_name_to_the_pointer() -> None:
    element = svg(curve_page(asked_for(two_steps(layers=40)), "long", "MiB"))
    titles = [title.text for title in element.iter(f"{SVG}title")]

    assert "loss" not in words(element)
    assert titles.count("loss") == 2


def test_a_run_that_died_says_so() -> None:
    page = curve_page(replayed(two_steps(), capacity=450 * MIB), "tiny", "MiB")

    assert "The run ran out of memory." in page
    assert "out of memory" in words(svg(page))


def test_names_are_text_and_never_markup() -> None:
    """A module path or a title cannot break out of where it stands."""
    nasty = "</script><b>&"
    events = [Event(EventType.PHASE, phase=nasty), Event(EventType.ALLOC, 1, 100, module=nasty)]
    table = TextTable(nasty, (Column(nasty),), [(nasty,)])
    page = curve_page(asked_for(events), nasty, "bytes", [table])

    assert nasty not in page
    assert page.count("</script>") == 2
    assert data(page)["stretches"][1][6:] == [nasty, nasty]


def test_tables_follow() -> None:
    grid = TextTable(
        "Largest", (Column("what"), Column("GiB", right=True)), [("a", "1.00"), ("b", "2.00")], frozenset({1})
    )
    page = curve_page(asked_for(two_steps()), "tiny", "MiB", [grid])

    assert "<h2>Largest</h2>" in page
    assert '<tr class="strong"><td>b</td><td class="right">2.00</td></tr>' in page


def test_nothing_to_draw() -> None:
    page = curve_page(MemoryCurve(asked_for([]).timeline), "nothing")

    assert "<p>Nothing was allocated.</p>" in page
    assert data(page)["stretches"] == []


@pytest.mark.parametrize(
    ("top", "step"), [(574, 100), (516, 100), (0.9, 0.2), (6, 1), (6.1, 2), (79.1, 20), (1e-3, 2e-4), (12, 2)]
)
def test_lines_stand_at_round_numbers(top: float, step: float) -> None:
    assert round_step(top) == pytest.approx(step)
    assert top / round_step(top) <= 6


def test_phases_belong_to_steps() -> None:
    spans = asked_for(two_steps()).spans
    steps = step_marks(spans)

    assert [mark.word for mark in phase_marks(spans)][:5] == ["model", "optimizer", "input", "zero_grad", "forward"]
    assert [mark.word for mark in steps] == ["setup", "step 1", "step 2"]
    assert steps[-1] == AxisMark("step 2", steps[1].end, 78)
    assert step_marks(spans[:3]) == []


def test_the_suffix_decides(tmp_path: Path) -> None:
    write_plot(tmp_path / "run.HTML", asked_for(two_steps()), "tiny")

    assert (tmp_path / "run.HTML").read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(
        InputError, match=r"run\.gif ends in '\.gif'\. The suffix decides .* \.png, \.svg, \.html, \.json\."
    ):
        write_plot(tmp_path / "run.gif", asked_for(two_steps()), "tiny")
    with pytest.raises(InputError, match="run has no suffix"):
        write_plot(tmp_path / "run", asked_for(two_steps()), "tiny")
    with pytest.raises(InputError, match=r"no directory .*nowhere\. Create it first"):
        write_plot(tmp_path / "nowhere" / "run.svg", asked_for(two_steps()), "tiny")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    write_plot(tmp_path / "run.html", asked_for(two_steps()), "tiny")

    with pytest.raises(Unavailable) as error:
        write_plot(tmp_path / "run.png", asked_for(two_steps()), "tiny")

    assert str(error.value) == (
        "run.png: PNG and SVG are drawn by matplotlib, which is not installed. Run: pip install 'matplotlib>=3.8'. A "
        "page (.html) needs nothing."
    )


def test_phases_of_generation_belong_to_no_step() -> None:
    phases = ("model", "prefill", "decode_1", "decode", "decode_last")
    spans = [
        asked_for(two_steps()).spans[0]._replace(phase=phase, begin=at, end=at + 1) for at, phase in enumerate(phases)
    ]

    assert step_marks(spans) == []
    assert [mark.word for mark in phase_marks(spans)] == list(phases)
