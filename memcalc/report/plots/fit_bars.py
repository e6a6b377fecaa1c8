"""The answer of `fit` as bars: the run as configured, and what fits in its place."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.ledger.component import Component
from memcalc.ledger.result import Result
from memcalc.ledger.verdict import Verdict
from memcalc.report.labels import REST, label
from memcalc.report.plots.bars import BarGroup, BarPart, Panel, RunBar
from memcalc.report.plots.palette import OUTSIDE, color
from memcalc.report.screens.fit_tables import CARD_WORDS, shown_gpus
from memcalc.report.screens.fit_text import amount, layouts_sentence, minimum_sentence, short_layout, unchanged_sentence
from memcalc.report.screens.oom_changes import settings
from memcalc.report.screens.verdict import because
from memcalc.report.tables.breakdown import breakdown, folded
from memcalc.search.costs import TERMS
from memcalc.search.maxima import Maximum
from memcalc.search.ranking import BestLayout
from memcalc.search.result import FitResult, Nearest
from memcalc.spec.hardware.gpus import find_gpu
from memcalc.spec.recompute_plan import words as plan_words
from memcalc.units import BYTES_PER_UNIT, Unit, format_bytes

# Paul Tol's "light" scheme, apart from the colors of components: https://personal.sron.nl/~pault/data/colourschemes.pdf
_TERM_COLORS = dict(
    zip(TERMS, ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00"), strict=True)
)
_REST_COLOR = "#cccccc"
_MOST_PARTS = 8  # of a bar
_WHOLE = "#4a6fa5"  # memory with unknown parts
_MOST_CHANGES = 8
_NAMES = {"micro_batch_size": "micro-batch", "sequence_length": "sequence length"}


def fit_title(answer: FitResult, unit: Unit) -> str:
    """Return the answer in a sentence or two; where nothing fits, why."""
    if answer.query.minimize is not None:
        return f"{answer.name}: {minimum_sentence(answer, unit)}"
    if answer.query.maximize is not None:
        found = next(iter(answer.maxima.values()), None)
        what = "" if found is None else f"{_name(found)} {found.value:,} is the largest that fits" * bool(found.value)
        return f"{answer.name} on {answer.gpus} {answer.gpu.name}: {what or 'none fits'}{_cause(answer, unit)}"
    sentence = layouts_sentence(answer).rstrip(":")
    if not answer.best and answer.unchanged is not None:
        sentence = f"{unchanged_sentence(answer, unit)} {sentence}"
    return f"{answer.name} on {answer.gpus} {answer.gpu.name}: {sentence}{_cause(answer, unit)}"


def _cause(answer: FitResult, unit: Unit) -> str:
    return "" if answer.reason is None else f". {because(answer.reason, unit)}"


def fit_blocks(answer: FitResult, unit: Unit) -> list[BarGroup]:
    """Return the blocks of the picture; what the query left out has none."""
    blocks = []
    replaced = any(offer.layouts for offer in answer.offers)
    asked = [] if answer.unchanged is None or replaced else [_of_result("as configured", answer.unchanged, unit)]
    if replaced:
        blocks += _offers(answer, unit)
    elif answer.best:
        rows = [_layout(found, unit) for found in answer.best]
        memory = Panel(f"{unit} of the fullest GPU at its peak", (*(memory for memory, _ in rows),))
        seconds = Panel("seconds of a step at peak rates", tuple(seconds for _, seconds in rows))
        blocks.append(BarGroup("The cheapest layouts that fit", (memory, seconds)))
    rest = [
        *asked,
        *_largest(answer, unit),
        *_recomputed(answer, unit),
        *(_change(found, answer, unit) for found in answer.smallest_changes[:_MOST_CHANGES]),
    ]
    if answer.gpu_verdicts:
        blocks.append(BarGroup("The run on each GPU", (Panel(f"{unit} of a GPU", tuple(_gpus(answer, unit))),)))
    elif rest:
        title = (
            "The run, the largest that fit, and the smallest changes that make it fit" if len(rest) > 1 else "The run"
        )
        blocks.append(BarGroup(title, (Panel(f"{unit} of the fullest GPU at its peak", tuple(rest)),)))
    return blocks


def _layout(found: BestLayout, unit: Unit) -> tuple[RunBar, RunBar]:
    spec, costs = found.result.spec, found.costs
    training = spec.training
    name = f"{short_layout(spec)}, b{training.micro_batch_size} x {training.gradient_accumulation_steps}"
    terms = tuple(
        BarPart(f"{term} (s)", _TERM_COLORS[term], getattr(costs, term)) for term in TERMS if getattr(costs, term)
    )
    return _of_result(name, found.result, unit), RunBar(name, terms, f"{costs.total:.3g} s")


def _of_result(name: str, result: Result, unit: Unit) -> RunBar:
    """Return the bar of a run with the parts of its memory."""
    size, parts = BYTES_PER_UNIT[unit], folded(breakdown(result), _MOST_PARTS)
    found = [BarPart(label(part), _color(part), count / size) for part, count in parts.inside.items()]
    if outside := sum(parts.outside.values()):
        found.append(BarPart("cached, context, NCCL", OUTSIDE, outside / size))
    limit = None if result.gpu is None else result.gpu.usable_bytes / size
    needed = result.headline.device_bytes or result.ledger.peak_bytes
    return RunBar(name, tuple(found), format_bytes(needed, unit), limit, result.verdict != "does-not-fit")


def _color(part: str) -> str:
    return _REST_COLOR if part == REST else color(Component(part))


def _of_verdict(name: str, found: Verdict, usable: int, unit: Unit, words: str = "") -> RunBar:
    """Return the bar of a run with unknown parts."""
    least = "at least " * (found.device_bytes is None)
    words = f"{least}{format_bytes(found.needed_bytes, unit)}, {words or CARD_WORDS[found.answer]}"
    return _whole(name, found.needed_bytes, words, usable, unit, fits=found.answer != "does-not-fit")


def _whole(name: str, needed: int, words: str, usable: int, unit: Unit, *, fits: bool = True) -> RunBar:
    size = BYTES_PER_UNIT[unit]
    return RunBar(name, (BarPart("all memory", _WHOLE, needed / size),), words, usable / size, fits)


def _recomputed(answer: FitResult, unit: Unit) -> Iterator[RunBar]:
    """Yield the bar of the run with the least recomputation that fits, or with full recomputation if none fits."""
    found = answer.least_recompute
    if answer.all_recomputed is not None:
        yield _of_result("recompute full", answer.all_recomputed, unit)
    if found is not None:
        words = format_bytes(found.device_bytes, unit)
        yield _whole(
            f"recompute {plan_words(found.recompute)}", found.device_bytes, words, answer.gpu.usable_bytes, unit
        )


def _largest(answer: FitResult, unit: Unit) -> Iterator[RunBar]:
    """Each largest value, and the next one, which does not fit."""
    usable = answer.gpu.usable_bytes
    for found in answer.maxima.values():
        if found.result is not None:
            yield _of_result(f"{_name(found)} {found.value:,}, the largest", found.result, unit)
        if found.next_value is not None and found.next_verdict is not None:
            yield _of_verdict(f"{_name(found)} {found.next_value:,}", found.next_verdict, usable, unit)


def _name(found: Maximum) -> str:
    return _NAMES.get(found.quantity, found.quantity)


def _change(found: Nearest, answer: FitResult, unit: Unit) -> RunBar:
    """Return the bar of a change that makes the run fit, with its cost in time."""
    time = "" if found.slowdown is None else f", {round(100 * found.slowdown):+d}% GPU time"
    usable = find_gpu(found.change.spec.hardware.gpu or answer.gpu.name).usable_bytes
    words = f"{format_bytes(found.change.needed, unit)}{time}"
    return _whole(settings(found.change), found.change.needed, words, usable, unit)


def _gpus(answer: FitResult, unit: Unit) -> Iterator[RunBar]:
    for sized in shown_gpus(answer):
        yield _of_verdict(sized.gpu.name, sized.verdict, sized.gpu.usable_bytes, unit, sized.lacks)


def _offers(answer: FitResult, unit: Unit) -> list[BarGroup]:
    """Return the bars of the GPUs with a price on which the run fits: memory, and the cost of a million tokens."""
    rows = [(offer, offer.layouts.best[0].result) for offer in answer.offers if offer.layouts is not None]
    if not rows:
        return []
    names = [
        f"{offer.gpu.name} x {result.spec.parallelism.ranks}, {short_layout(result.spec)}" for offer, result in rows
    ]
    memory = tuple(_of_result(name, result, unit) for name, (_, result) in zip(names, rows, strict=True))
    costs = tuple(
        RunBar(
            name,
            (BarPart("cost", _WHOLE, offer.of_tokens),),
            f"{amount(offer.of_tokens)}, {amount(offer.hourly)} an hour",
        )
        for name, (offer, _) in zip(names, rows, strict=True)
    )
    panels = (
        Panel(f"{unit} of the fullest GPU at its peak", memory),
        Panel("cost of a million tokens at peak rates", costs),
    )
    return [BarGroup("The cheapest layout on each GPU that has a price", panels)]
