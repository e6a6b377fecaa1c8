"""The sentences of `fit`'s screen."""

from __future__ import annotations

from math import floor, inf, log10

from memcalc.ledger.verdict import Answer, Verdict, holding_memory
from memcalc.report.labels import count, listed, plural, shortened
from memcalc.report.screens.oom_changes import as_typed, settings
from memcalc.report.screens.verdict import because, subject, verdict
from memcalc.search.maxima import Maximum
from memcalc.search.minima import MOST_GPUS
from memcalc.search.result import FitResult, Nearest
from memcalc.spec.recompute_plan import words
from memcalc.spec.spec import Spec
from memcalc.suggestions.candidates import MORE_GPUS, OTHER_CARD, OTHER_RESULT, SAME
from memcalc.units import Unit, format_bytes, format_host_memory

MAKERS = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel", "huawei": "Huawei", "google": "Google"}

MOST_GAPS = 4  # of the smaller values that do not fit

_NAMES = {
    "micro_batch_size": "micro-batch",
    "sequence_length": "sequence length",
    "layers": "layers",
    "parameters": "parameters",
}


def subject_lines(answer: FitResult) -> list[str]:
    """Return the run and its GPUs."""
    system = answer.system
    where = f"{plural(answer.gpus, 'GPU')}, {answer.gpu.name}"
    if answer.gpus > 1:
        where += f", {system.node} per node: {system.link}, {system.link_bytes / 1e9:g} GB/s"
    if answer.gpus > system.node:
        where += f"; between nodes {system.nic_bytes * 8 / 1e9:g} Gbit/s per GPU"
    known = answer.unchanged or (answer.best[0].result if answer.best else None)
    if known is None:
        return [answer.name, where]
    headline = subject(known)
    return [f"{headline.run}, as {headline.modules}", where]


def unchanged_sentence(answer: FitResult, unit: Unit) -> str:
    """Whether the run fits as configured."""
    if answer.unchanged is None:
        return f"As configured, the run is invalid: {answer.unasked}."
    return f"As configured, on {subject(answer.unchanged).layout}: {verdict(answer.unchanged, unit)}"


def layouts_sentence(answer: FitResult) -> str:
    """Return how many layouts fit: at least, and with those that may."""
    ranking = answer.ranking
    if ranking is None:
        return ""
    batch = f"for {plural(answer.sequences, 'sequence')} per step"
    if not ranking.fitting:
        if ranking.tried == 0:
            return "No layout is valid: --why lists the excluded layouts."
        if ranking.undecided == ranking.tried == 1:
            return f"The only layout may fit, {batch}: the GPU's memory is inside its interval of recorded runs."
        if ranking.undecided:
            return (
                f"None of {plural(ranking.tried, 'layout')} fits for sure, {batch}. {ranking.undecided:,} may fit: the "
                "GPU's memory is inside their intervals of recorded runs."
            )
        if ranking.tried == 1:
            return f"The only layout does not fit, {batch}."
        return f"None of {plural(ranking.tried, 'layout')} fits, {batch}."
    least, most = len(ranking.fitting), len(ranking.fitting) + ranking.undecided
    shown = "; the cheapest of each split" if len(answer.best) < most else ""
    number = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    fit = "fits" if ranking.tried == 1 else "fit"
    return f"{number} of {plural(ranking.tried, 'layout')} {fit}, {batch}{shown}:"


def layouts_verdict(answer: FitResult) -> Answer:
    """Whether any layout fits."""
    undecided = answer.ranking is not None and answer.ranking.undecided
    return "fits" if answer.best else "unknown" if undecided else "does-not-fit"


def minimum_sentence(answer: FitResult, unit: Unit) -> str:
    """Return the result of --minimize as a sentence."""
    if answer.query.minimize == "gpus":
        return _fewest_sentence(answer)
    if answer.query.minimize == "cost":
        return _cheapest_sentence(answer)
    if answer.base is None:
        return unchanged_sentence(answer, unit)
    return _gpu_sentence(answer) if answer.query.minimize == "gpu_kind" else _recompute_sentence(answer, unit)


def _fewest_sentence(answer: FitResult) -> str:
    if answer.fewest is None:
        bound = answer.query.gpus
        more = "" if bound else " (--gpus N searches up to N)"
        sure = " for sure; some layouts may fit" if answer.may_be_fewer else ""
        return f"No number of GPUs up to {bound or MOST_GPUS:,} is enough{sure}{more}."
    sure = " for sure, but some may" if answer.may_be_fewer else ""
    return f"At least {plural(answer.fewest, 'GPU')}: with fewer, no layout fits{sure}."


def _cheapest_sentence(answer: FitResult) -> str:
    first, most = answer.offers[0], answer.query.gpus or MOST_GPUS
    if first.layouts is None:
        sure = " for sure; some layouts may fit" if answer.verdict == "unknown" else ""
        return f"The run fits on none of these GPUs{sure}, with up to {most:,} of each."
    return (
        f"Lowest cost per token: {plural(first.layouts.gpus, 'GPU')} of type {first.gpu.name}, "
        f"{amount(first.of_tokens)} per million tokens at peak rates, {amount(first.hourly)} per hour."
    )


def amount(price: float | None) -> str:
    """Return a price with at least two decimals, and with three digits where it is below 1."""
    if price is None:
        return ""
    if price >= 1:
        return f"{price:,.2f}"
    whole, _, decimals = f"{price:.{2 - floor(log10(price))}f}".partition(".")
    return f"{whole}.{decimals.rstrip('0'):0<2}"


def _gpu_sentence(answer: FitResult) -> str:
    maker, most = MAKERS[answer.gpu.vendor], inf if answer.smallest is None else answer.smallest.gpu.usable_bytes
    smaller = (sized for sized in answer.gpu_verdicts if not sized.lacks and sized.gpu.usable_bytes < most)
    fits = "fits the run" + " for sure" * any(sized.verdict.answer == "unknown" for sized in smaller)
    if answer.smallest is None:
        return f"No {maker} GPU of the table {fits}, {searched_run(answer)}."
    return f"{answer.smallest.gpu.name} is the smallest {maker} GPU that {fits}, {searched_run(answer)}."


def _recompute_sentence(answer: FitResult, unit: Unit) -> str:
    found = answer.least_recompute
    if found is None:
        assert answer.all_recomputed is not None, "it was tried"
        return f"With recompute = full, {searched_run(answer)}: {verdict(answer.all_recomputed, unit)}"
    needed = f"{searched_run(answer)}; needs {format_bytes(found.device_bytes, unit)}."
    if isinstance(found.recompute, str):
        return f"recompute = {found.recompute} is the least recomputation that fits, {needed}"
    return f"Recomputing the first {found.layers} of {found.of} layers of each chunk is the least that fits, {needed}"


def searched_run(answer: FitResult) -> str:
    """Return the run that the largest and smallest values refer to."""
    if answer.base is None or not answer.base_is_best:
        return "everything else unchanged"
    return f"everything else as in the cheapest layout: {layout_text(answer.base)}"


def layout_text(spec: Spec) -> str:
    """Return a layout in a few words."""
    parallelism = spec.parallelism
    degrees = ("tensor", "pipeline", "context", "expert", "data")
    parts = [f"{name} {size}" for name in degrees if (size := getattr(parallelism, f"{name}_parallel")) > 1]
    if parallelism.sequence_parallel:
        parts.append("sequence-parallel")
    if parallelism.virtual_stages > 1:
        parts.append(f"{parallelism.virtual_stages} chunks per stage")
    return ", ".join([*parts, f"ZeRO {parallelism.zero_stage}", f"recompute {words(spec.training.recompute)}"])


def short_layout(spec: Spec) -> str:
    """Return a layout in the letters of the table of layouts; degrees of 1 are left out."""
    parallelism = spec.parallelism
    degrees = {"t": "tensor", "c": "context", "e": "expert", "p": "pipeline", "N": "data"}
    parts = [
        f"{sign}{size}" for sign, name in degrees.items() if (size := getattr(parallelism, f"{name}_parallel")) > 1
    ]
    return ", ".join([*parts, f"ZeRO {parallelism.zero_stage}", f"recompute {words(spec.training.recompute)}"])


def layout_legend(answer: FitResult) -> str:
    """Return the legend of the table of layouts."""
    experts = any(found.result.spec.parallelism.expert_parallel > 1 for found in answer.best)
    return (
        f"t tensor (+sp: sequence-parallel), c context, {'e expert, ' * experts}p pipeline, N data parallelism, "
        "v chunks of layers per stage, b micro-batch, m micro-batches per step, seconds of a step at peak rates"
    )


def maximum_lines(found: Maximum, unit: Unit) -> list[str]:
    """Return the largest value, the memory of this and of the next value, and notes."""
    size = f"{_NAMES[found.quantity]} {found.value:,}"
    if found.quantity == "parameters":
        size = f"{count(found.parameters)} parameters ({found.value:,} query heads)"
    lines = [size if found.value else f"{_NAMES[found.quantity]}: none fits{_none(found, unit)}"]
    needed = None if found.result is None else found.result.headline.device_bytes
    if needed is not None:
        lines.append(f"needs {format_bytes(needed, unit)}; {_next(found, needed, unit)}")
    elif found.next_verdict is None and found.end:
        lines.append(found.end)
    if found.is_close:
        lines.append("close: fits by its replay, but the GPU's memory is inside the interval of recorded runs")
    if found.result is not None and found.is_at_most:
        missing = holding_memory(found.result.limits)
        lines.append(f"at most: not modelled: {listed([limit.feature for limit in missing])}")
    if found.gaps:
        more = f" and {len(found.gaps) - MOST_GAPS} more" if len(found.gaps) > MOST_GAPS else ""
        gaps = ", ".join(f"{gap:,}" for gap in found.gaps[:MOST_GAPS])
        lines.append(f"smaller values that do not fit, of those tried: {gaps}{more}")
    if found.quantity == "parameters" and found.overrides:
        lines.append(f"as options: {as_typed(found.overrides)}")
    if found.note and found.value:
        lines.append(found.note)
    return lines


def _none(found: Maximum, unit: Unit) -> str:
    """Return the need of the smallest value, in parentheses."""
    smallest = found.next_verdict
    if smallest is None:
        return ""
    sure = " for sure" if smallest.answer == "unknown" else ""
    return f"{sure} ({found.next_value:,} needs {_bytes_of(smallest, unit)})"


def _next(found: Maximum, needed: int, unit: Unit) -> str:
    if found.next_value is None:
        return f"no larger value is possible: {found.end}"
    following = found.next_verdict
    if following is None:
        return f"{found.next_value:,} is invalid: {found.end}"
    size = _bytes_of(following, unit)
    if size == format_bytes(needed, unit) and following.needed_bytes > needed:  # the GPU's memory ends between the two
        size = f"{following.needed_bytes - needed:,} bytes more"
    if following.answer == "does-not-fit":
        return f"{found.next_value:,} does not fit: needs {size}"
    if following.assumed:
        return f"{found.next_value:,} does not fit with the values assumed below; with others it needs {size}"
    if following.interval is not None and following.interval.of_candidates:
        return f"{found.next_value:,} fits with the values assumed below, but may not with others"
    if following.interval is not None and following.interval.errors.replayed:
        return f"{found.next_value:,} does not fit by its replay, but is close: needs {size}"
    return f"{found.next_value:,} may not fit: needs {size}"


def _bytes_of(found: Verdict, unit: Unit) -> str:
    """Return what a run needs, with its interval if that makes the verdict uncertain."""
    size = format_bytes(found.needed_bytes, unit)
    if found.device_bytes is None or found.unmodelled:
        return f"at least {size}"
    if found.answer == "unknown" and found.interval is not None and not found.interval.errors.replayed:
        low, high = (format_bytes(end, unit) for end in found.interval[:2])
        return f"{size}, by recorded runs {low} to {high}"
    return size


def reason_lines(answer: FitResult, unit: Unit) -> list[str]:
    """Return the largest components of the peak of a run that does not fit, and the remedy."""
    if answer.reason is None:
        return []
    lines = [because(answer.reason, unit)]
    if answer.reason.remedy is None and answer.query.maximize is not None:
        lines.append(
            "No single change that keeps the training result makes the run fit. `memcalc fit` without --maximize lists "
            "pairs of changes, more GPUs and other GPUs."
        )
    return lines


def changes_title(answer: FitResult) -> str:
    """Return the run that the changes apply to, or that there are none."""
    run = "" if answer.all_recomputed is None else " with all layers recomputed"
    if not answer.smallest_changes:
        return f"No change that was tried, alone or in pairs, makes the run fit{run}."
    return f"The smallest changes that make the run fit{run}"


# The heading of a group of changes, by their effect on the training result.
KINDS_OF_CHANGES = {
    SAME: "Same training result, same GPUs",
    MORE_GPUS: "Same training result, more GPUs",
    OTHER_CARD: "Same training result, another GPU",
    OTHER_RESULT: "Another training result",
}


def change_lines(found: Nearest, unit: Unit) -> tuple[str, str]:
    """Return a change in the syntax of `--set`; and the memory that the changed run needs, with the cost."""
    change = found.change
    time = "more GPU time per token, not known to the cost model"
    if found.slowdown is not None:
        time = f"{round(100 * found.slowdown):+d}% GPU time per token by the cost model"
    host = ""
    if found.host_bytes:
        host = f", and {format_host_memory(found.host_bytes, found.node_host_bytes, unit)}"
    return settings(change), f"then needs {format_bytes(change.needed, unit)}{host}; cost: {change.cost}; {time}"


def notes(answer: FitResult, *, why: bool) -> list[str]:
    """Return the notes on the result."""
    found = []
    if answer.offers:
        found.append("prices are from --price; use the cost per million tokens to compare GPUs, not to predict a bill")
    if answer.best and answer.query.maximize is None:
        found.append(
            "use the costs to rank layouts, not to predict step times: all rates are peaks, and nothing overlaps"
        )
    if answer.system.assumed and answer.gpus > answer.system.node:
        found.append(answer.system.assumed)
    above = max((maximum.above for maximum in answer.maxima.values() if maximum.value), default=0)
    if above:
        values = "next value was" if above == 1 else f"{above} next values were"
        nexts = (maximum.next_verdict for maximum in answer.maxima.values())
        sure = " for sure" if any(each is not None and each.answer == "unknown" for each in nexts) else ""
        found.append(f"largest: the {values} tried too, and none fits{sure}; a larger value could fit only by chance")
    if answer.pruned and not why:
        excluded = sum(answer.pruned.values())
        were, them = ("was", "it") if excluded == 1 else ("were", "them")
        found.append(f"{plural(excluded, 'invalid layout')} {were} excluded; --why lists {them}")
    return [*found, *map(shortened, answer.notes)]
