"""The picture of a run in letters."""

import io
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from memcalc.events import Event, EventType
from memcalc.events.memory_curve import MemoryCurve
from memcalc.ledger.component import Component
from memcalc.report.color_screen import ColorScreen
from memcalc.report.plots.text_chart import draw_curve
from memcalc.report.screen import Screen
from memcalc.units import Unit
from tests.report.runs import MIB, asked_for, replayed, two_steps

Golden = Callable[[str, str], None]


def drawn(course: MemoryCurve, width: int = 80, unit: Unit = "MiB", rows: int = 16) -> str:
    file = io.StringIO()
    draw_curve(Screen(file, width), course, unit, rows)
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["asked_for", "replayed", "died"])
def test_pictures(name: str, width: int, golden: Golden) -> None:
    courses = {
        "asked_for": lambda: asked_for(two_steps()),
        "replayed": lambda: replayed(two_steps()),
        "died": lambda: replayed(two_steps(), capacity=450 * MIB),
    }
    text = drawn(courses[name](), width)

    golden(f"course_{name}_{width}", text)
    assert max(len(line) for line in text.splitlines()) <= width


def columns(text: str) -> list[str]:
    """The picture's columns from the bottom up."""
    axis = next(line for line in text.splitlines() if "+--" in line).index("+")
    rows = [line[axis + 1 :] for line in text.splitlines() if line[axis : axis + 1] == "|"]
    width = max(map(len, rows))
    return ["".join(row.ljust(width)[at] for row in reversed(rows)).rstrip() for at in range(width)]


def block(storage: int, size: int, component: Component | None) -> Event:
    return Event(EventType.ALLOC, storage, size, component=component)


def test_a_cell_has_the_letter_of_its_middle() -> None:
    """Four rows of 25 of 100: middles at 12.5, 37.5, 62.5 and 87.5. Of 38 + 30 + 32 the second holds 62.5 only."""
    sizes = {Component.WEIGHTS: 38, Component.ACTIVATIONS: 30, Component.TEMPORARIES: 32}
    events = [block(number, size, component) for number, (component, size) in enumerate(sizes.items())]
    text = drawn(asked_for(events), 30, "bytes", rows=4)
    found = columns(text)

    assert found[-1] == "WWAT"
    assert {found[0], found[len(found) // 2], found[-1]} == {"WW", "WWA", "WWAT"}


def test_unattributed_memory_has_a_mark() -> None:
    assert columns(drawn(asked_for([block(1, 100, None)]), 30, "bytes", rows=4))[0] == "????"


def test_the_peak_reaches_the_top_and_is_named() -> None:
    text = drawn(asked_for(two_steps()))
    tall = [at for at, column in enumerate(columns(text)) if len(column) == 16]

    line = next(line for line in text.splitlines() if line.endswith("peak 516.0 MiB in loss_2 v"))
    axis = next(line for line in text.splitlines() if "|" in line).index("|")
    assert line.rindex("v") - axis - 1 == tall[0]


def test_an_early_peak_is_named_on_its_right() -> None:
    events = [block(1, 100, Component.WEIGHTS), Event(EventType.FREE, 1), block(1, 50, Component.WEIGHTS)]

    assert "\n       v peak 100 bytes\n" in drawn(asked_for(events), 60, "bytes")


def test_the_legend_sums_to_the_peak() -> None:
    """The letters' rows of the legend, in bytes."""
    text = drawn(replayed(two_steps()), 120, "bytes")
    rows = re.findall(r"^  [A-Z?] +[a-z ]+? +([\d,]+) +[<\d.]+%$", text, re.MULTILINE)
    total = re.search(r"allocated +([\d,]+)$", text, re.MULTILINE)

    assert total is not None
    assert sum(int(row.replace(",", "")) for row in rows) == int(total[1].replace(",", ""))


def test_reserved_lies_over_allocated() -> None:
    assert any("-" in column and column.rstrip("-") != column for column in columns(drawn(replayed(two_steps()))))
    assert not any("-" in column for column in columns(drawn(asked_for(two_steps()))))


def test_the_end_of_the_gpu_is_a_line_of_its_own() -> None:
    """600 of 600 MiB are the top row; 5,000 would make the picture small."""
    near, far = (drawn(replace(asked_for(two_steps()), limit=size * MIB)) for size in (600, 5000))

    assert all(column.ljust(16)[15] == "=" for column in columns(near))
    assert "MiB requested; = is the usable memory" in near
    assert "=" not in far


def test_nothing_to_draw() -> None:
    assert drawn(asked_for([])) == "Memory over the run: nothing was allocated.\n\n"
    assert drawn(asked_for([Event(EventType.PHASE, phase="model")])).startswith("Memory over the run: nothing")


def test_a_very_narrow_terminal() -> None:
    assert max(len(column) for column in columns(drawn(asked_for(two_steps()), 5))) == 16


def test_color_changes_no_letter() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="standard", highlight=False)
    draw_curve(ColorScreen(console), replayed(two_steps()), "MiB")

    assert re.sub(r"\x1b\[[\d;]*m", "", file.getvalue()) == drawn(replayed(two_steps()))
