"""Views of several runs: what fits, two compared, a plan, a measurement, and the configs of a repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memcalc.documents.timeline import POINTS
from memcalc.report.labels import label
from memcalc.report.screens.verdict import subject
from memcalc.report.views.estimate import bars_section, verdict_section
from memcalc.report.views.sections import Section, drawn_sections, group, list_section, table_section, view
from memcalc.report.views.timeline import memory_section
from memcalc.units import Unit

if TYPE_CHECKING:
    from memcalc.checking.comparison import Comparison
    from memcalc.checking.report import CheckReport
    from memcalc.ledger.result import Result
    from memcalc.recomputation.recommendation import RecomputeResult
    from memcalc.recomputation.verification import DeviceVerification
    from memcalc.search.result import FitResult
    from memcalc.validation.predicted_vs_measured import PredictedVsMeasured

View = dict[str, Any]

# Of a report on many configs: about 130 bytes a point, hence 520 kB for all curves.
MOST_TIMELINES = 100
POINTS_OF_ALL = 4000


def fit_view(answer: FitResult, unit: Unit, *, why: bool = False) -> View:
    """What fits, as `memcalc fit` shows it: the answer, memory over the cheapest layout, and the rest.

    `why` adds the excluded layouts.
    """
    from memcalc.report.screens.fit import draw_fit
    from memcalc.report.screens.fit_text import subject_lines

    sections = drawn_sections(lambda screen: draw_fit(screen, answer, unit, why=why))
    head, rest = sections[:2], sections[2:]  # the run, and whether it and which layouts fit
    layouts = [layout.result for layout in answer.best[:1]]
    timelines = [
        memory_section(result, unit) | {"title": f"The cheapest layout: {_layout(result)}"} for result in layouts
    ]
    return view(f"What fits: {subject_lines(answer)[0]}", [*head, *timelines, *rest])


def _layout(result: Result) -> str:
    return subject(result).rpartition("; ")[2]


def difference_view(difference: Comparison, unit: Unit, timelines: Sequence[Section]) -> View:
    """Two runs side by side, each with its timeline; then their components and phases."""
    from memcalc.report.screens.diff import difference_grids

    both = [
        view(name, [verdict_section(result, unit), bars_section(result, unit), timeline])
        for name, result, timeline in zip(("A", "B"), difference.results, timelines, strict=True)
    ]
    grids = difference_grids(difference, unit)
    return view("Two runs compared", [group("", both), *map(table_section, grids)])


def recompute_view(
    planning: RecomputeResult, unit: Unit, checked: list[DeviceVerification], more: Sequence[Section] = ()
) -> View:
    """A plan of activation recomputation, as `memcalc recompute` shows it; `more` is the timeline of the run."""
    from memcalc.report.screens.recompute import draw_planning

    sections = drawn_sections(lambda screen: draw_planning(screen, planning, unit, checked))
    head, rest = sections[:2], sections[2:]
    return view(f"Activation recomputation: {subject(planning.result).partition(chr(10))[0]}", [*head, *more, *rest])


def measured_view(found: PredictedVsMeasured, unit: Unit, more: Sequence[Section] = ()) -> View:
    """A measured run next to its predictions, as `memcalc measure` shows it; `more` is its timeline."""
    from memcalc.report.screens.measurement import draw_measured

    measured = found.results[-1]
    sections = drawn_sections(lambda screen: draw_measured(screen, found.results, unit, found.missing))
    return view(f"Measured: {subject(measured).partition(chr(10))[0]}", [*more, *sections])


def checks_view(report: CheckReport, unit: Unit, results: Mapping[str, Result]) -> View:
    """The table of all configs, as `memcalc check` shows it; then each with its verdict and timeline.

    Those that fail come first, and only MOST_TIMELINES have a timeline: the report stays small enough to pass around.

    Args:
        report: the check.
        unit: of memory.
        results: of the configs that could be read, by their path.
    """
    from memcalc.report.checks.table import draw_checks

    sections = drawn_sections(lambda screen: draw_checks(screen, report, unit))
    ordered = sorted(
        (each for each in report.outcomes if each.path in results), key=lambda each: not report.fails(each)
    )
    shown = ordered[:MOST_TIMELINES]
    points = min(POINTS, POINTS_OF_ALL // max(len(shown), 1))
    each = [
        view(f"{outcome.path}: {outcome.status}", _short_sections(results[outcome.path], unit, points))
        for outcome in shown
    ]
    title = "Configs" if len(shown) == len(ordered) else f"The first {len(shown)} of {len(ordered)} configs"
    more = [group(title, each, folded=True)] if each else []
    return view("Configs checked", [*sections, *more])


def _short_sections(result: Result, unit: Unit, points: int) -> list[Section]:
    timeline = memory_section(result, unit, points, formulas=False)
    return [verdict_section(result, unit), bars_section(result, unit), timeline]


def trace_view(result: Result, unit: Unit, sections: Sequence[Section], references: Sequence[Result] = ()) -> View:
    """A traced run: `sections` are its timeline and tables; `references` are the results it is compared with."""
    from memcalc.report.tables.comparison import comparison_grids, source_label
    from memcalc.report.views.estimate import estimate_sections

    compared = [*map(table_section, comparison_grids((*references, result), unit))] if references else []
    words = [f"Compared with: {', '.join(label(source_label(other)) for other in references)}."] if references else []
    return view(
        f"Traced: {subject(result).partition(chr(10))[0]}",
        [*estimate_sections(result, unit, sections), *list_section("Comparison", words), *compared],
    )
