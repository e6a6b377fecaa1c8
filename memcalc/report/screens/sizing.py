"""A result on the terminal: the verdict first, then components, phases, and the basis of the numbers."""

from __future__ import annotations

from io import StringIO

from memcalc.ledger.result import ModuleResult, Result, Sizing
from memcalc.report.labels import plural, shortened
from memcalc.report.screen import (
    BAD,
    GOOD,
    PLAIN,
    UNSURE,
    Details,
    Screen,
    Span,
    TextTable,
    draw_bar,
    draw_grid,
    draw_line,
    draw_list,
)
from memcalc.report.screens.verdict import assumed, because, error_bars, figures, modules_sentence, subject, verdict
from memcalc.report.tables.breakdown import Breakdown, bar_lines, breakdown, component_grid, folded, host_grid
from memcalc.report.tables.phases import phase_grid, rank_grid
from memcalc.report.tables.textbook import generation_grid, short_textbook_grid, textbook_grid
from memcalc.units import Unit, format_bytes

VERDICT_STYLES = {"fits": GOOD, "does-not-fit": BAD, "unknown": UNSURE, None: "bold"}
MOST_LINES = 30  # of the short answer for one GPU
MOST_LINES_OF_MANY = 40  # for any layout
_SEARCH = "`memcalc fit` with the same options searches for changes and layouts that fit."
_PARTS = (7, 6, 5, 4, 3)  # components at the peak that the short answer shows, as many as there is room for


class BufferedScreen(Screen):
    """Lines that are kept, to be counted before they are drawn."""

    def __init__(self, width: int) -> None:
        super().__init__(StringIO(), width)
        self.lines: list[tuple[Span, ...]] = []

    def line(self, *spans: Span) -> None:
        """Keep the spans as one line."""
        self.lines.append(spans)


def draw_short(screen: Screen, result: Result, unit: Unit = "GiB", details: Details = PLAIN) -> None:
    """Draw the default screen of `memcalc estimate`: verdict, reason, components of the peak, published numbers.

    At most MOST_LINES lines of 80 columns for one GPU, MOST_LINES_OF_MANY for any layout; omitted lines are counted.
    The advice on a run that does not fit is shown where the reason has no change that does.
    """
    ranks = result.spec.parallelism.ranks
    room = MOST_LINES if ranks == 1 else MOST_LINES_OF_MANY
    sketches = (_short(result, unit, screen.width, most, details) for most in _PARTS)
    chosen = next((sketch for sketch in sketches if len(sketch.lines) <= room), None)
    if chosen is None:  # a narrow screen, on which lines wrap
        chosen = _short(result, unit, screen.width, _PARTS[-1], details)
    for spans in chosen.lines:
        screen.line(*spans)


def _short(result: Result, unit: Unit, width: int, most: int, details: Details) -> BufferedScreen:
    sketch, reason, advice = BufferedScreen(width), details.reason, details.advice
    parts = folded(breakdown(result), most)
    for line in subject(result).lines:
        draw_line(sketch, line, 0)
    sketch.line()
    draw_line(sketch, verdict(result, unit), 0, style=VERDICT_STYLES[result.verdict])
    remedied = reason is not None and reason.remedy is not None
    why = because(reason, unit) if reason else ""
    fails = result.verdict == "does-not-fit"
    search = "" if remedied and fails else _SEARCH if advice and fails else advice
    traced = f"{result.notes[0]}." if result.source == "trace" else ""  # see memcalc.tracing.trace.in_place_of_formulas
    for line in (traced, assumed(result, unit), why, modules_sentence(details.other, unit), search):
        if line:
            draw_line(sketch, line, 0)
    sketch.line()
    _draw_bar(sketch, result, unit, parts)
    sketch.lines.pop()  # the table is the bar's legend
    grid = component_grid(result, unit, parts)
    draw_grid(sketch, grid if len(result.ranks) > 1 else grid._replace(title=""))  # the reason names the phase
    if result.headline.host is not None:
        draw_line(sketch, f"Host memory: {format_bytes(result.headline.host.peak_bytes, unit)} per rank", 0)
        sketch.line()
    published = generation_grid(result, unit) if result.generation else short_textbook_grid(result, unit)
    if published is not None:
        draw_grid(sketch, published)
    draw_line(sketch, _further(result), 0, style="dim")
    return sketch


def _further(result: Result) -> str:
    """Return the line that lists the contents of --full and --explain."""
    counted = [(len(result.notes), "note"), (len(result.not_modelled), "limit")]
    found = " and ".join(plural(number, word) for number, word in counted if number)
    shown = "phases, largest batch and context" if result.generation and result.gpu else "phases"
    return f"More: --full ({shown}, {found or 'totals'}), --explain (formulas, sources)."


def draw_sizing(screen: Screen, result: Result | ModuleResult, unit: Unit = "GiB", details: Details = PLAIN) -> None:
    """Draw the screen of `memcalc estimate --full`."""
    reason, explain = details.reason, details.explain
    for line in subject(result).lines:
        draw_line(screen, line, 0)
    screen.line()
    draw_line(screen, verdict(result, unit), 0, style=VERDICT_STYLES[result.verdict])
    why = because(reason, unit) if reason else ""
    for line in (
        assumed(result, unit),
        error_bars(result, unit),
        why,
        modules_sentence(details.other, unit),
        details.advice,
    ):
        if line:
            draw_line(screen, line, 0)
    screen.line()
    draw_grid(screen, figures(result, unit))
    if not details.brief:
        _draw_bar(screen, result, unit)
        draw_grid(screen, component_grid(result, unit))
    if (host := host_grid(result, unit)) is not None:
        draw_grid(screen, host)
    if details.all_ranks:
        draw_grid(screen, rank_grid(result, unit))
    if not details.brief:
        draw_grid(screen, phase_grid(result, unit))
        published = published_grid(result, unit)
        if published is not None:
            draw_grid(screen, published)
    if explain is not None and isinstance(result, Result):
        _draw_explanation(screen, result, unit, explain)
    draw_list(screen, "Notes", map(shortened, result.notes))
    draw_list(screen, "Not modelled", result.not_modelled)


def published_grid(result: Result | ModuleResult, unit: Unit) -> TextTable | None:
    """Return the table of the cache for generation, else published formulas compared with the ledger."""
    if isinstance(result, Result) and result.generation:
        return generation_grid(result, unit, largest=True)
    return textbook_grid(result, unit)


def _draw_bar(screen: Screen, result: Sizing, unit: Unit, parts: Breakdown | None = None) -> None:
    bar, below = bar_lines(result, unit, min(screen.width, 120) - 4, parts)
    draw_bar(screen, bar)
    if below:
        screen.line((f"  {below}", ""))
    screen.line()


def _draw_explanation(screen: Screen, result: Result, unit: Unit, word: str) -> None:
    from memcalc.report.tables.explanation import PARAMETERS, RECIPE, chapters, parameter_grid

    if word == PARAMETERS:
        draw_grid(screen, parameter_grid(result.spec.model))
        return
    if word == RECIPE:
        from memcalc.report.tables.explanation import MODULES_TEXT, recipe_grid

        draw_grid(screen, recipe_grid(result.spec))
        draw_list(screen, "Modules", MODULES_TEXT)
        return
    for chapter in chapters(result, word, unit):
        screen.line((chapter.heading, "bold"))
        for group in chapter.groups:
            draw_line(screen, f"live {group.phases}; from {group.citation}", 2, style="dim")
            for entry in group.entries:
                draw_line(screen, f"{entry.description}  {entry.size}", 4)
                draw_line(screen, entry.formula, 8)
        if not chapter.groups:
            draw_line(screen, "nothing", 2)
        screen.line()
