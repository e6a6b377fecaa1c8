"""Whole screens, and the invariants that hold on their text: rows sum to totals, nothing is cut off."""

import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from memcalc import estimate
from memcalc.ledger.result import Result
from memcalc.report.color_screen import ColorScreen
from memcalc.report.csv_text import ledger_csv
from memcalc.report.labels import signed_percent
from memcalc.report.markdown import sizing_markdown
from memcalc.report.screen import Details, Screen
from memcalc.report.screens.sizing import draw_sizing
from memcalc.report.tables.breakdown import component_grid
from memcalc.report.tables.phases import rank_grid
from memcalc.units import Unit, format_number

Golden = Callable[[str, str], None]


def screen(result: Result, width: int = 80, unit: Unit = "GiB", **options) -> str:
    file = io.StringIO()
    draw_sizing(Screen(file, width), result, unit, Details(**options))
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["result", "fitting", "too_large", "two_stages"])
def test_screens(name: str, width: int, golden: Golden, request: pytest.FixtureRequest) -> None:
    text = screen(request.getfixturevalue(name), width, all_ranks=name == "two_stages")

    golden(f"screen_{name}_{width}", text)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text


def test_brief_is_the_answer_without_the_tables(fitting: Result, golden: Golden) -> None:
    whole, brief = screen(fitting), screen(fitting, brief=True)

    golden("screen_fitting_brief", brief)
    assert len(brief.splitlines()) <= 30
    assert set(brief.splitlines()) < set(whole.splitlines())
    assert "Not modelled" in brief
    assert set(sizing_markdown(fitting, details=Details(brief=True)).splitlines()) < set(
        sizing_markdown(fitting).splitlines()
    )


def test_explained(result: Result, golden: Golden) -> None:
    golden("screen_explained", screen(result, explain="all"))


def test_markdown(two_stages: Result, golden: Golden) -> None:
    golden("markdown", sizing_markdown(two_stages, details=Details(all_ranks=True, explain="activations")))


def test_csv(result: Result, golden: Golden) -> None:
    golden("ledger_csv", ledger_csv(result))


@pytest.mark.parametrize("name", ["result", "fitting", "too_large"])
def test_components_on_the_screen_sum_to_the_peak(name: str, request: pytest.FixtureRequest) -> None:
    result: Result = request.getfixturevalue(name)
    text = screen(result, 120, "bytes")
    table = text[text.index("At the peak") : text.index("Phases")]
    sizes = [
        (mark, int(size.replace(",", "")))
        for mark, size in re.findall(r"^  (\S| )  [^\d\n]+? +([\d,]{4,})  ", table, re.MULTILINE)
    ]
    inside = [size for mark, size in sizes if mark.isupper()]
    outside = [size for mark, size in sizes if mark.islower()]
    totals = [size for mark, size in sizes if mark == " "]

    assert totals[0] == sum(inside) == result.ledger.peak_bytes
    if outside:
        assert totals[1] == sum(inside) + sum(outside) == result.headline.device_bytes


def test_every_letter_of_the_bar_is_in_the_table(too_large: Result) -> None:
    text = screen(too_large)
    bar = next(line.strip() for line in text.splitlines() if re.fullmatch(r"  [A-Za-z.]{60,}", line))
    legend = {row[0] for row in component_grid(too_large, "GiB").rows}

    assert set(bar) <= legend


def test_the_verdict_comes_first_and_says_it_in_words(result: Result, fitting: Result, too_large: Result) -> None:
    first = [screen(each).split("\n\n")[1] for each in (result, fitting, too_large)]

    assert first[0] == "Peak per GPU: 9.18 GiB allocated. Add --gpu to check whether it fits."
    assert first[1].splitlines()[0] == "FITS: needs 10.60 GiB of 79.10 GiB usable on NVIDIA H100 SXM (68.50 GiB free)."
    assert first[1].splitlines()[1].startswith("Interval: 10.50 GiB to 10.70 GiB, 95% of 30 recorded runs (one GPU; ")
    assert " ".join(first[2].split()).startswith(
        "DOES NOT FIT: needs 23.80 GiB, but Tesla T4 has 14.56 GiB usable (9.24 GiB over)."
    )


@pytest.mark.parametrize("name", ["result", "fitting", "too_large", "two_stages"])
def test_color_changes_no_letter(name: str, request: pytest.FixtureRequest) -> None:
    result = request.getfixturevalue(name)
    plain = screen(result, 80, all_ranks=True, explain="all")
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="standard", highlight=False)
    draw_sizing(ColorScreen(console), result, details=Details(all_ranks=True, explain="all"))

    assert file.getvalue() != plain
    assert re.sub(r"\x1b\[[\d;]*m", "", file.getvalue()) == plain


def test_one_line_for_each_stage_and_the_worst_marked(two_stages: Result) -> None:
    rows = rank_grid(two_stages, "GiB").rows

    assert [row[0] for row in rows] == ["0", "1"]
    assert rows[0][-1] == "fits <- most"
    assert rows[1][-1] == "fits"


def test_consecutive_stages_with_equal_figures_share_a_line() -> None:
    """GPipe: the stages between the first, which has the embedding, and the last, which has the head, are equal."""
    text = "num_layers=8", "pipeline_parallel=8", "schedule=gpipe", "gradient_accumulation=8"
    result = estimate("gpt2", *text, gpu="t4").replayed
    rows = rank_grid(result, "GiB").rows
    by_stage = {kind.rank["pipeline_stage"]: kind.ledger.peak_bytes for kind in result.ranks}

    assert len(set(by_stage.values())) < 8
    assert [row[0] for row in rows] == ["0", "1 to 6", "7"]
    assert all(row[2] == format_number(by_stage[int(row[0].split(" to ")[0])], "GiB") for row in rows)


@pytest.mark.parametrize(
    ("difference", "base", "text"),
    [
        (1, 8, "+12.50%"),
        (-8, 8, "-100.00%"),
        (8, 1, "+800.00%"),
        (9, 1, "×10"),
        (30_038_706, 512, "×58,670"),  # 30,039,218 / 512 = 58,670.3; as a percentage +5,866,934.77%
        (5, 0, "-"),
    ],
)
def test_a_large_growth_is_a_factor(difference: int, base: int, text: str) -> None:
    assert signed_percent(difference, base) == text
