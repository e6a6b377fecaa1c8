"""Views of several runs: what fits, two compared, a plan, a measurement, and the configs of a repository."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from memcalc.checking.report import urgency
from memcalc.report.labels import label
from memcalc.report.screens.verdict import subject
from memcalc.report.views.estimate import bars_section, verdict_section
from memcalc.report.views.reduction import thin_timelines
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

POINTS_OF_ALL = 6000  # of all timelines of a report on many configs; a point takes about 130 bytes
COMFORTABLE = 0.9  # of the limit: timelines of configs that need less are the first to be left out


def fit_view(answer: FitResult, unit: Unit, *, why: bool = False) -> View:
    """Return the view of `memcalc fit`: the result, memory over the cheapest layout, and the tables.

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
    return subject(result).layout


def difference_view(difference: Comparison, unit: Unit, timelines: Sequence[Section]) -> View:
    """Two runs side by side, each with its timeline; then their components and phases."""
    from memcalc.report.screens.diff import difference_grids

    highest = max((section["highest"] for section in timelines), default=0)
    timelines = [section | {"highest": highest} for section in timelines]  # one scale, to be compared by eye
    both = [
        view(name, [verdict_section(result, unit), bars_section(result, unit), timeline])
        for name, result, timeline in zip(("A", "B"), difference.results, timelines, strict=True)
    ]
    grids = difference_grids(difference, unit)
    return view("Two runs compared", [group("", both), *map(table_section, grids)])


def recompute_view(
    planning: RecomputeResult, unit: Unit, checked: list[DeviceVerification], more: Sequence[Section] = ()
) -> View:
    """Return the view of a recomputation plan, as in `memcalc recompute`; `more` is the timeline of the run."""
    from memcalc.report.screens.recompute import draw_planning

    sections = drawn_sections(lambda screen: draw_planning(screen, planning, unit, checked))
    head, rest = sections[:2], sections[2:]
    return view(f"Activation recomputation: {subject(planning.result).run}", [*head, *more, *rest])


def measured_view(found: PredictedVsMeasured, unit: Unit, more: Sequence[Section] = ()) -> View:
    """Return the view of a measured run with its predictions, as in `memcalc measure`; `more` is its timeline."""
    from memcalc.report.screens.measurement import draw_measured

    measured = found.results[-1]
    sections = drawn_sections(lambda screen: draw_measured(screen, found.results, unit, found.missing))
    head, rest = sections[:2], sections[2:]  # the run, and the measurement with its predictions
    return view(f"Measured: {subject(measured).run}", [*head, *more, *rest])


def checks_view(report: CheckReport, unit: Unit) -> View:
    """Return the view of `memcalc check`: the table of all configs, then the described ones, the most urgent first.

    `write_report` leaves out more if the file would be large.

    Args:
        report: the check, with descriptions by `check_sections`.
        unit: of memory.
    """
    from memcalc.report.checks.table import draw_checks

    sections = drawn_sections(lambda screen: draw_checks(screen, report, unit))
    described = sorted((each for each in report.outcomes if each.description is not None), key=urgency)
    if not described:
        return view("Configs checked", sections)
    thinned = [deepcopy(outcome.description) for outcome in described]
    for description in thinned:
        thin_timelines(description, POINTS_OF_ALL // len(described))
    each = [
        view(f"{outcome.path}: {outcome.status}", description)
        | {"comfortable": not report.fails(outcome) and outcome.filled <= COMFORTABLE}
        for outcome, description in zip(described, thinned, strict=True)
    ]
    all_configs = len(report.outcomes)
    which = "Configs" if len(described) == all_configs else f"{len(described)} of {all_configs} configs"
    title = f"{which}: those that do not fit first, then the closest to their limit"
    return view("Configs checked", [*sections, group(title, each, folded=True)])


def check_sections(result: Result, unit: Unit) -> list[Section]:
    """Return verdict, bars and timeline of one config, for `checks_view`."""
    timeline = memory_section(result, unit, formulas=False)
    return [verdict_section(result, unit), bars_section(result, unit), timeline]


def trace_view(result: Result, unit: Unit, sections: Sequence[Section], references: Sequence[Result] = ()) -> View:
    """Return the view of a traced run; `sections` are timeline and tables, `references` the results to compare with."""
    from memcalc.report.tables.comparison import comparison_grids, source_label
    from memcalc.report.views.estimate import estimate_sections

    compared = [*map(table_section, comparison_grids((*references, result), unit))] if references else []
    words = [f"Compared with: {', '.join(label(source_label(other)) for other in references)}."] if references else []
    return view(
        f"Traced: {subject(result).run}",
        [*estimate_sections(result, unit, sections), *list_section("Comparison", words), *compared],
    )
