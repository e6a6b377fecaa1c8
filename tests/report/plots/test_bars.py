"""Several runs as bars: lengths are bytes, nothing that is written overlaps, and the title has the cause."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.report.plots.bars import BarGroup, BarPart, Panel, RunBar, bars_figure, save_bars
from memcalc.report.plots.fit_bars import fit_blocks, fit_title
from memcalc.report.plots.pareto_plot import front_figure, plan_bars, save_front, together
from tests.report.fits import answer
from tests.thinning import quick_every

pytest.importorskip("matplotlib")

DRAWN = ["layouts", "changes", "nothing", "batch", "smallest_card", "recompute", "fewest", "cost", "none_at_a_price"]


def texts(figure: Any) -> list[tuple[str, Any]]:
    """Everything that is drawn in words, with the box that it takes, in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    beyond = {id(label) for axes in figure.findobj(_is_axes) for label in _not_drawn(axes)}
    return [
        (text.get_text(), text.get_window_extent(canvas.get_renderer()))
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and id(text) not in beyond
    ]


def _is_axes(artist: Any) -> bool:
    return hasattr(artist, "get_xticks")


def _not_drawn(axes: Any) -> list[Any]:
    """The labels of ticks beyond the ends of an axis, and those that another panel has."""
    found = []
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, sorted(axes.get_ylim()))):
        for tick in axis.get_major_ticks():
            found += [tick.label2] if low <= tick.get_loc() <= high else [tick.label1, tick.label2]
    return found


def overlapping(drawn: list[tuple[str, Any]]) -> list[tuple[str, str]]:
    """Return pairs of texts with boxes that overlap by more than a pixel."""
    return [
        (one, other)
        for (one, a), (other, b) in combinations(drawn, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
    ]


@pytest.mark.parametrize("name", quick_every(3, DRAWN))
def test_nothing_overlaps_or_leaves_the_picture(name: str) -> None:
    found = answer(name)
    figure = bars_figure(fit_title(found, "GiB"), fit_blocks(found, "GiB"))

    drawn = texts(figure)
    assert overlapping(drawn) == []
    width, height = figure.get_size_inches() * figure.dpi
    for text, box in drawn:
        assert -1 <= box.x0 < box.x1 <= width + 1, text
        assert -1 <= box.y0 < box.y1 <= height + 1, text


def test_an_overlap_is_seen() -> None:
    figure = bars_figure("two titles", [])
    figure.text(0.01, 0.98, "over the first", va="top")

    assert overlapping(texts(figure)) == [("two titles", "over the first")]


@pytest.mark.parametrize("name", ["layouts", "changes", pytest.param("cost", marks=pytest.mark.long)])
def test_bars_are_bytes_and_seconds(name: str) -> None:
    found = answer(name)
    memory, other = fit_blocks(found, "bytes")[0].panels

    shown = [offer.layouts.best[0] for offer in found.offers if offer.layouts] or found.best
    for bar, best in zip(memory.bars, shown, strict=True):
        assert sum(part.size for part in bar.parts) == best.result.headline.device_bytes
        assert bar.limit == (None if best.result.gpu is None else best.result.gpu.usable_bytes)
    costs = [offer.of_tokens for offer in found.offers if offer.layouts] or [best.costs.total for best in found.best]
    for bar, cost in zip(other.bars, costs, strict=True):
        assert sum(part.size for part in bar.parts) == pytest.approx(cost)


def test_what_does_not_fit_is_marked_and_the_title_says_why() -> None:
    found = answer("nothing")
    (block,) = fit_blocks(found, "GiB")

    assert "DOES NOT FIT: needs 189.15 GiB" in fit_title(found, "GiB")
    asked = block.panels[0].bars[0]
    assert (asked.label, asked.fits) == ("as configured", False)
    assert all(bar.fits for bar in block.panels[0].bars[3:])  # the changes
    batch = answer("batch")
    _, largest, following = fit_blocks(batch, "GiB")[0].panels[0].bars
    assert (largest.fits, following.fits) == (True, False)
    value = batch.maxima["micro_batch_size"].value
    assert fit_title(batch, "GiB").endswith(f"micro-batch {value:,} is the largest that fits")


def test_the_same_runs_give_the_same_file(tmp_path: Path) -> None:
    bar = RunBar("$a$ <b>\x1b[2J", (BarPart("all", "#4a6fa5", 1.0),), "1 GiB", 2.0)
    for name in ("a.svg", "b.svg"):
        save_bars(tmp_path / name, "title " * 60, [BarGroup("runs", (Panel("GiB", (bar,)),))])

    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "\x1b" not in (tmp_path / "a.svg").read_text()
    save_bars(tmp_path / "a.png", "nothing to draw", [])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_plans_that_all_need_the_same_are_bars_with_the_cause(tmp_path: Path) -> None:
    """The peak of a small batch is the optimizer's step: recomputation gains nothing."""
    planning = memcalc.recompute("llama-3-8b", "recipe=pure", "b=2", gpu="h100-80gb")
    title, blocks = plan_bars(planning, "GiB")

    assert title.endswith("No plan needs less: the peak is in optimizer step 1")
    memory, again = blocks[0].panels
    assert len({bar.parts[0].size for bar in memory.bars}) == 1
    assert [bar.caption for bar in again.bars[:3]] == ["0.0%", "0.0%", "93.5%"]
    assert overlapping(texts(bars_figure(title, blocks))) == []
    save_front(tmp_path / "plans.svg", planning)
    assert "No plan needs less" in (tmp_path / "plans.svg").read_text()


def test_words_at_the_front_do_not_overlap() -> None:
    planning = memcalc.recompute("gpt2", "b=8", gpu="t4")

    assert overlapping(texts(front_figure(planning))) == []
    marks = [("a", 0.0, 10.0), ("b", 0.01, 10.1), ("c", 0.5, 100.0), ("d", 1.0, 0.0)]
    assert together(marks) == [(["a", "b"], 0.0, 10.0), (["c"], 0.5, 100.0), (["d"], 1.0, 0.0)]
