"""`--html`: one file that stands alone, small, with the views of the page; names in it stay text."""

from __future__ import annotations

import hashlib
import io
import json
import re
from base64 import b64encode
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from benchmarks.check import write
from memcalc.report.html.html_report import MOST_BYTES, report_page
from memcalc.report.html.notebook import sections_html
from memcalc.report.plots.html import html_table
from memcalc.report.screen import (
    BAD,
    GOOD,
    UNSURE,
    Column,
    Screen,
    TextTable,
    draw_bar,
    draw_grid,
    draw_line,
    markdown_grid,
)
from memcalc.report.views.sections import drawn_sections, view
from tests.cli.conftest import Run, run  # noqa: F401 -- the fixture that runs a command

GPT2 = ["gpt2", "--gpu", "t4"]
TINY = ["gpt2", "--set", "num_layers=2", "--set", "s=64", "--set", "vocab_size=512"]
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "estimate": (["estimate", *GPT2], ["verdict", "bars", "timeline", "components", "table", "table", "list"]),
    "pipeline": (["estimate", *GPT2, "--set", "pipeline_parallel=2"], ["verdict", "bars", "timeline", "components"]),
    "fit": (["fit", *GPT2, "--gpus", "2"], ["lines", "lines", "timeline", "table"]),
    "diff": (["diff", *GPT2[:1], *GPT2, "--set-b", "b=2"], ["views", "table", "table"]),
    "recompute": (["recompute", *GPT2, "--set", "b=8"], ["lines", "lines", "timeline", "table"]),
    "check": (["check", "configs/gpt2.yaml", "configs/gpt3.yaml", "--gpu", "t4"], ["table", "table", "lines", "views"]),
    "trace": (["trace", *TINY, "--gpu", "a100-40gb"], ["verdict", "bars", "timeline", "table"]),
    "measure": (["measure", *TINY, "--device", "cpu"], ["lines", "lines", "timeline"]),
}


def data_of(page: str) -> dict[str, Any]:
    """The view that a report draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


MEASURES = pytest.param("measure", marks=pytest.mark.long)  # it runs the step


@pytest.mark.parametrize("name", [MEASURES if name == "measure" else name for name in COMMANDS])
def test_each_command_writes_a_report_that_stands_alone(run: Callable[..., Run], name: str, tmp_path: Path) -> None:  # noqa: F811
    words, kinds = COMMANDS[name]
    if name in ("trace", "measure"):
        pytest.importorskip("torch")
    path = tmp_path / "report.html"
    plain, reported = run(*words), run(*words, "--html", str(path))
    assert reported.code == plain.code
    if name != "measure":  # its clock differs
        assert reported.out == plain.out
    page = path.read_text(encoding="utf-8")
    assert len(page.encode()) <= MOST_BYTES
    assert not re.search(r"""(?:src|href|action)\s*=\s*["']?(?:https?:)?//""", page)
    assert [section["kind"] for section in data_of(page)["sections"]][: len(kinds)] == kinds


def test_its_policy_allows_its_own_scripts_alone() -> None:
    page = report_page(view("x", []))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    allowed = re.findall(r"'sha256-([^']+)'", page)
    assert len(scripts) == 2
    assert [b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts] == allowed
    assert "default-src 'none'" in page


@pytest.mark.parametrize(
    "name", ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<!--", "\u2028"]
)
def test_a_name_cannot_end_the_data(name: str) -> None:
    page = report_page(view(name, [{"kind": "list", "title": name, "items": [name]}]))
    head, _, data = page.partition('id="data">')
    assert name not in data.partition("</script>")[0]
    assert "<img" not in head
    assert page.count("</script>") == 3
    assert data_of(page)["sections"][0]["items"] == [name]


def test_a_suffix_that_is_no_report_is_refused_before_the_estimate(run: Callable[..., Run], tmp_path: Path) -> None:  # noqa: F811
    code, out, err = run("estimate", "gpt2", "--html", str(tmp_path / "report.pdf"))
    assert (code, out) == (2, "")
    assert ".html" in err


def test_a_legend_stands_below_its_table_everywhere() -> None:
    grid = TextTable("sizes", (Column("t"),), [("2",)], legend="t tensor parallelism")
    screen = io.StringIO()
    draw_grid(Screen(screen, 80), grid)

    assert screen.getvalue() == "sizes\n  t\n  2\n  t tensor parallelism\n\n"
    assert markdown_grid(grid) == ["### sizes", "", "| t |", "| --- |", "| 2 |", "", "t tensor parallelism", ""]
    (section,) = drawn_sections(lambda screen: draw_grid(screen, grid))
    assert section["legend"] == "t tensor parallelism"
    assert "t tensor parallelism" in sections_html([section])
    assert "t tensor parallelism" in html_table(grid)


def test_the_style_sheet_knows_what_a_terminal_colors() -> None:
    css = files("memcalc.page").joinpath("static", "views.css").read_text()
    for style in (GOOD, BAD, UNSURE):

        def draw(screen: Any, style: str = style) -> None:
            draw_line(screen, "verdict", 0, style)

        (section,) = drawn_sections(draw)
        for name in section["lines"][0]["style"].split():
            assert f".line.{name}" in css


def test_a_screen_is_kept_as_it_is_drawn() -> None:
    """Lines with their indentation and style, tables as tables, and an empty line between sections."""

    def draw(screen: Any) -> None:
        draw_line(screen, "first", 0, "bold")
        draw_line(screen, "second", 2)
        screen.line()
        screen.line(("  third", "dim"))
        draw_bar(screen, "WWGG")  # left out: the table has its numbers
        draw_grid(screen, TextTable("title", (Column(""), Column("n", right=True)), [("W", "1")], letters=True))

    assert drawn_sections(draw) == [
        {
            "kind": "lines",
            "lines": [
                {"text": "first", "indent": 0, "style": "bold"},
                {"text": "second", "indent": 2, "style": ""},
            ],
        },
        {"kind": "lines", "lines": [{"text": "third", "indent": 2, "style": "dim"}]},
        {
            "kind": "table",
            "title": "title",
            "columns": [{"head": "n", "right": True}],
            "rows": [["1"]],
            "strong": [],
            "head": True,
            "legend": "",
        },
    ]


def test_a_column_of_bars_becomes_shares() -> None:
    grid = TextTable("sizes", (Column("t"), Column("")), [("2", "##"), ("8", "########"), ("0", "")])
    (section,) = drawn_sections(lambda screen: draw_grid(screen, grid))
    assert (section["rows"], section["shares"]) == ([["2"], ["8"], ["0"]], [0.25, 1.0, 0.0])
    assert [column["head"] for column in section["columns"]] == ["t"]


def test_two_timelines_have_one_scale(run: Callable[..., Run], tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "report.html"
    run("diff", "gpt2", "gpt2", "--gpu", "t4", "--set-b", "b=8", "--html", str(path))
    sides = data_of(path.read_text())["sections"][0]["views"]
    first, second = (side["sections"][-1] for side in sides)
    reserved = [max(each["document"]["points"]["reserved_bytes"]) for each in (first, second)]
    assert reserved[0] < reserved[1] == first["highest"] == second["highest"]


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (("--gpu", "h100-80gb", "--margin", "77GiB"), "but 2.10 GiB are allowed"),
        (("--gpu", "h100-80gb", "--budget", "5GiB"), " of 5.00 GiB allowed ("),
        (("--budget", "2GiB"), "but a GPU with 2GiB has 2.00 GiB usable"),
        (("--gpu", "h100-80gb"), " of 79.10 GiB usable on NVIDIA H100"),
    ],
)
def test_each_config_is_judged_by_the_limit_of_its_check(
    run: Callable[..., Run],  # noqa: F811
    limits: tuple[str, ...],
    told: str,
    tmp_path: Path,
) -> None:
    """gpt2 needs 4.32 GiB with its device context: table, title, verdict and bars agree."""
    path = tmp_path / "report.html"
    fails = run("check", "configs/gpt2.yaml", *limits, "--html", str(path)).code
    table, *_, details = data_of(path.read_text())["sections"]
    (shown,) = details["views"]
    verdict, bars, *_ = shown["sections"]

    assert table["rows"][0][0].strip() == ("too large" if fails else "fits")
    assert shown["title"].endswith("does not fit" if fails else ": fits")
    assert verdict["answer"] == ("does-not-fit" if fails else "fits")
    assert told in verdict["text"]
    assert bars["limit"]["text"].partition(" GiB ")[0] + " GiB " in verdict["text"]


@pytest.mark.long
def test_a_report_on_1001_configs_is_small_enough(run: Callable[..., Run], tmp_path: Path) -> None:  # noqa: F811
    """All of them in the table, the details of those that fail or nearly fill their GPU, at most 1 MB."""
    configs, path = tmp_path / "configs", tmp_path / "report.html"
    configs.mkdir()
    write(configs, 1000)
    assert run("check", str(configs), "--gpu", "h100-80gb", "--html", str(path)).code == 2
    assert path.stat().st_size <= MOST_BYTES
    *before, details = data_of(path.read_text())["sections"]
    tables = [section["rows"] for section in before if section["kind"] == "table"]
    assert max(map(len, tables)) == 1000  # the invalid one is listed separately
    assert details["title"].startswith("100 of 1001 configs: ")
    assert sum(view["sections"][-1]["kind"] == "timeline" for view in details["views"]) >= 80


@pytest.mark.long
def test_a_report_on_many_configs_is_small_enough(run: Callable[..., Run], tmp_path: Path) -> None:  # noqa: F811
    """All presets with their timelines, at most 1 MB."""
    path = tmp_path / "report.html"
    assert run("check", "configs", "--gpu", "h100-80gb", "--html", str(path)).code == 1
    assert path.stat().st_size <= MOST_BYTES
    configs = data_of(path.read_text())["sections"][-1]
    assert len(configs["views"]) == len([*Path("configs").glob("*.yaml")])
