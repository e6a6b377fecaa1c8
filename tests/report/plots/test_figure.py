"""The picture as a file, drawn by matplotlib."""

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from memcalc.events import Event, EventType
from memcalc.events.memory_curve import MemoryCurve
from memcalc.ledger.component import Component
from memcalc.report.plots.matplotlib_figure import curve_figure, save_figure
from memcalc.report.plots.palette import color
from tests.report.runs import MIB, asked_for, replayed, two_steps

pytest.importorskip("matplotlib")


def drawn(course: MemoryCurve) -> Any:
    """The axes of the picture."""
    figure: Any = curve_figure(course, "tiny", "MiB")
    (axes,) = figure.axes
    return axes


def words(course: MemoryCurve) -> set[str]:
    """Everything that is written on the picture."""
    axes = drawn(course)
    return {text.get_text() for text in axes.texts} | {text.get_text() for text in axes.get_legend().get_texts()}


def test_the_peak_is_marked_with_its_value() -> None:
    axes = drawn(asked_for(two_steps()))
    dots = [line for line in axes.lines if line.get_marker() == "o"]

    assert "peak 516.0 MiB in loss_2" in words(asked_for(two_steps()))
    assert [tuple(dot.get_xydata()[0])[1] for dot in dots] == [pytest.approx(516.03125)]


def test_each_component_has_its_color_and_reaches_its_height() -> None:
    """Stacked over the stretch of the peak: weights to 96, optimizer state to 288, activations to 416."""
    from matplotlib.colors import to_hex

    axes = drawn(asked_for(two_steps()))
    shapes = {shape.get_label(): shape for shape in axes.collections}
    tops = {name: max(y for _, y in shape.get_paths()[0].vertices) for name, shape in shapes.items()}

    assert tops["weights"] == 96
    assert tops["optimizer state"] == 96 + 96 + 192
    assert tops["logits and loss"] == 96 + 192 + 128 + 100
    for component in (Component.WEIGHTS, Component.ACTIVATIONS):
        assert to_hex(shapes[component.value].get_facecolor()[0]).upper() == color(component)


def test_phases_and_steps_are_named_where_they_have_room() -> None:
    found = words(asked_for(two_steps(layers=16)))

    assert {"forward", "backward", "step 1", "step 2", "setup"} <= found
    assert "optimizer" not in found  # one event of 246


def test_the_legend_tells_the_bytes_at_the_peak() -> None:
    assert {"reserved", "optimizer state  192.0", "weights  96.0"} <= words(replayed(two_steps()))
    assert "reserved" not in words(asked_for(two_steps()))


def test_the_end_of_the_gpu_is_a_line() -> None:
    near, far = (replace(replayed(two_steps()), limit=size * MIB) for size in (500, 5000))

    assert "usable GPU memory" in words(near)
    assert "usable GPU memory" not in words(far)


def test_a_run_that_died_says_so() -> None:
    assert "out of memory" in words(replayed(two_steps(), capacity=450 * MIB))
    assert "out of memory" not in words(replayed(two_steps()))


def test_a_png_of_1200_by_600(tmp_path: Path) -> None:
    save_figure(tmp_path / "run.png", replayed(two_steps()), "tiny")
    data = (tmp_path / "run.png").read_bytes()

    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1200, 600)


def test_the_same_run_gives_the_same_svg(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        save_figure(tmp_path / name, replayed(two_steps()), "tiny")

    assert ET.parse(tmp_path / "one.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.parametrize("events", [[], [Event(EventType.PHASE, phase="model")]])
def test_a_run_without_allocations_is_an_empty_picture(events: list[Event], tmp_path: Path) -> None:
    save_figure(tmp_path / "run.svg", asked_for(events), "nothing")

    assert (tmp_path / "run.svg").stat().st_size > 0
