"""Results as the output of a notebook's cell: one line of text, and HTML that needs no script."""

import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

import memcalc
from memcalc.ledger.ledger import Ledger
from memcalc.report.html.notebook import result_html
from memcalc.report.labels import label
from memcalc.units import format_number


class Page(HTMLParser):
    """The text, the tags and the rows of the tables of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(html)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)


RESULTS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "estimate": (
        lambda: memcalc.estimate("gpt2", gpu="t4"),
        "<Result gpt2: peak 2.83 GiB in optimizer_step_1; t4: fits>",
        "FITS: needs",
    ),
    "fit": (lambda: memcalc.fit("gpt2", gpu="t4"), "<Fit gpt2 on 1 t4: fits; 1 layouts fit>", "The largest that fit"),
    "diff": (
        lambda: memcalc.diff("gpt2", "gpt2-medium"),
        (
            "<Comparison of <Result gpt2: peak 2.83 GiB in optimizer_step_1>, <Result gpt2-medium: peak 7.95 GiB in "
            "optimizer_step_1>>"
        ),
        "At the peak: A in optimizer_step_1, B in optimizer_step_1",
    ),
    "oom": (
        lambda: memcalc.oom("docs/examples/oom.log"),
        "<Diagnosis of docs/examples/oom.log: 1 reports; line 7>",
        "FRAGMENTATION: ",
    ),
    "recompute": (
        lambda: memcalc.recompute("gpt2", gpu="t4"),
        "<Planning gpt2: fits; none, peak 2.83 GiB, recomputes 0.0% of a forward>",
        "Plan and rules of thumb, peaks of allocated memory",
    ),
    "check": (
        lambda: memcalc.check("configs/gpt2.yaml", "configs/llama-65b.yaml", gpu="t4"),
        "<CheckReport of 2 configs: 1 fits, 1 does not fit>",
        "2 configs checked: 1 fit, 1 too large",
    ),
}


@pytest.mark.parametrize("verb", RESULTS)
def test_a_result_is_one_line_and_a_page_without_a_script(verb: str) -> None:
    make, line, said = RESULTS[verb]
    result = make()

    assert repr(result) == line
    page = Page(result._repr_html_())
    assert said in "".join(page.text)
    assert "table" in page.tags
    assert not {"script", "img", "link", "style", "iframe"} & {*page.tags}


def test_a_grid_is_one_line() -> None:
    assert repr(memcalc.sweep("gpt2", {"b": [1, 2]}, gpu="t4")) == "<Table of 2 configurations: 2 valid>"


def test_an_estimate_shows_its_ledger_and_memory_over_the_run() -> None:
    result = memcalc.estimate("llama-3-8b", recipe="pure", batch_size=4, gpu="h100")
    html = result._repr_html_() or ""
    page = Page(html)
    ledger: Ledger = result.replayed.ledger

    assert page.tags.count("svg") == 1
    shown = {row[0]: row[1] for row in reversed(page.rows) if len(row) > 1}  # the components come first
    for component, size in ledger.components(ledger.peak_phase).items():
        assert shown[label(component.value)] == format_number(size, "GiB")
    assert shown["allocated"] == format_number(ledger.peak_bytes, "GiB")
    assert "DOES NOT FIT" in "".join(page.text)
    assert "Cheapest change that fits: --set micro_batch_size=1" in "".join(page.text)
    assert len(html) < 200_000  # a notebook keeps the text of every output


def test_a_run_without_known_requests_has_no_plot() -> None:
    page = Page(memcalc.estimate("llama-3-8b", pipeline_parallel=2)._repr_html_() or "")

    assert "svg" not in page.tags
    assert "table" in page.tags


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a\u202eb\x1b[2J"])
def test_hostile_names_are_text(name: str) -> None:
    html = memcalc.estimate({"name": name, "preset": "gpt2"})._repr_html_() or ""

    assert name not in html
    assert not {"script", "img"} & {*Page(html).tags}


def test_what_has_no_screen_is_refused() -> None:
    with pytest.raises(TypeError, match="no screen shows Spec"):
        result_html(memcalc.load("gpt2"))


def test_reports_are_loaded_by_the_first_output() -> None:
    program = (
        "import sys, memcalc; result = memcalc.estimate('gpt2'); "
        "assert 'memcalc.report.html.notebook' not in sys.modules; result._repr_html_(); "
        "assert 'memcalc.report.html.notebook' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
