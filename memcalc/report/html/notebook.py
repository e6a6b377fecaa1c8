"""Results as HTML for the output of a notebook's cell: the tables of their screens, without a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from memcalc.checking.comparison import Comparison
from memcalc.checking.report import CheckReport
from memcalc.diagnosis.diagnosis import Diagnosis
from memcalc.errors import InputError
from memcalc.ledger.result import Result
from memcalc.recomputation.recommendation import RecomputeResult
from memcalc.report.checks.table import draw_checks
from memcalc.report.plots.html import curve_plot
from memcalc.report.plots.markup import markup
from memcalc.report.screen import Screen
from memcalc.report.screens.diff import draw_difference
from memcalc.report.screens.fit import draw_fit
from memcalc.report.screens.oom import draw_diagnosis
from memcalc.report.screens.recompute import draw_planning
from memcalc.report.screens.sizing import VERDICT_STYLES
from memcalc.report.screens.verdict import assumed, because, subject, verdict
from memcalc.report.tables.breakdown import component_grid
from memcalc.report.tables.textbook import generation_grid, short_textbook_grid
from memcalc.report.views.sections import CLASSES, Section, drawn_sections, list_section, table_section
from memcalc.search.result import FitResult
from memcalc.units import Unit
from memcalc.verdict.reasons import reason_of
from memcalc.verdict.timeline import timeline_of

_DRAWN: dict[type, Callable[[Screen, Any, Unit], None]] = {
    FitResult: draw_fit,
    Comparison: draw_difference,
    Diagnosis: draw_diagnosis,
    RecomputeResult: partial(draw_planning, checked=[]),
    CheckReport: draw_checks,
}
# The same hues as on a terminal: each has a contrast of at least 3 with black and with white.
_CSS = {"bold": "font-weight:bold", "dim": "opacity:.7", "green": "color:#008700", "red": "color:#d70000",
        "yellow": "color:#af8700"}  # fmt: skip
_GIB = 2**30


def result_html(result: object) -> str:
    """Return what a notebook shows of a result.

    Raises:
        TypeError: results of this type have no screen.
    """
    if isinstance(result, Result):
        return _estimate_html(result.replayed)
    draw = _DRAWN.get(type(result))
    if draw is None:
        raise TypeError(f"no screen shows {type(result).__name__}")
    return sections_html(drawn_sections(lambda screen: draw(screen, result, "GiB")))


def _estimate_html(result: Result) -> str:
    """Verdict and reason, memory over the run where it is known, the parts at the peak, published numbers, limits."""
    unit: Unit = "GiB" if result.ledger.peak_bytes >= _GIB else "MiB"
    return "\n".join((sections_html(_head(result, unit)), _plot(result, unit), sections_html(_rest(result, unit))))


def _head(result: Result, unit: Unit) -> Iterator[Section]:
    estimated = result.source == "estimate" and result.spec.inference is None
    reason = reason_of(result) if estimated else None
    run, *how = subject(result).lines
    style = VERDICT_STYLES[result.verdict]
    lines = [(run, "bold"), *((line, "dim") for line in how), (verdict(result, unit), CLASSES.get(style, style))]
    lines += [(line, "") for line in (assumed(result, unit), because(reason, unit) if reason else "") if line]
    yield {"kind": "lines", "lines": [{"text": text, "indent": 0, "style": style} for text, style in lines]}


def _plot(result: Result, unit: Unit) -> str:
    if result.source != "estimate" or result.spec.inference is not None:
        return ""
    try:
        course = timeline_of(result.spec, result.headline)
    except InputError:  # the order of its requests is not known
        return ""
    return curve_plot(course, unit)


def _rest(result: Result, unit: Unit) -> Iterator[Section]:
    yield table_section(component_grid(result, unit))
    published = generation_grid(result, unit) if result.generation else short_textbook_grid(result, unit)
    if published is not None:
        yield table_section(published)
    yield from list_section("Not modelled", result.not_modelled)


def sections_html(sections: Iterator[Section] | Sequence[Section]) -> str:
    """Return the lines, tables and lists of a view as HTML that needs neither a script nor a style sheet."""
    return "".join(f"<div>{_WRITERS[section['kind']](section)}</div>\n" for section in sections)


def _lines(section: Section) -> str:
    return "".join(
        f'<p style="margin:.2em 0 .2em {line["indent"] / 2:g}em{_css(line["style"])}">{markup(line["text"])}</p>'
        for line in section["lines"]
    )


def _css(style: str) -> str:
    return "".join(f";{_CSS[word]}" for word in style.split())


def _table(section: Section) -> str:
    columns = section["columns"]
    aligned = [f' style="text-align:{"right" if column["right"] else "left"};padding:1px 8px"' for column in columns]
    heads = "".join(f"<th{align}>{markup(column['head'])}</th>" for align, column in zip(aligned, columns, strict=True))
    rows = [f"<tr>{heads}</tr>"] if section["head"] else []
    for number, row in enumerate(section["rows"]):
        tag = "th" if number in section["strong"] else "td"
        rows.append(
            f"<tr>{''.join(f'<{tag}{at}>{markup(cell)}</{tag}>' for at, cell in zip(aligned, row, strict=True))}</tr>"
        )
    legend = f'<p style="{_CSS["dim"]}">{markup(section["legend"])}</p>' if section["legend"] else ""
    return f"{_title(section)}<table>{''.join(rows)}</table>{legend}"


def _list(section: Section) -> str:
    return f"{_title(section)}<ul>{''.join(f'<li>{markup(item)}</li>' for item in section['items'])}</ul>"


def _title(section: Section) -> str:
    return f"<p><b>{markup(section['title'])}</b></p>" if section["title"] else ""


_WRITERS: dict[str, Callable[[Section], str]] = {"lines": _lines, "table": _table, "list": _list}
assert {word for style in CLASSES.values() for word in style.split()} <= set(_CSS)
