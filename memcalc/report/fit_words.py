"""The sentences of `fit`'s screen."""

from __future__ import annotations

from memcalc.changes.candidates import MORE_GPUS, OTHER_CARD, OTHER_RESULT, SAME
from memcalc.fitting.answer import Fit, Nearest
from memcalc.fitting.maxima import Maximum
from memcalc.fitting.minima import MOST_GPUS
from memcalc.ledger.verdict import holding_memory
from memcalc.report.shortage_changes import as_typed, settings
from memcalc.report.verdict import subject, verdict
from memcalc.report.words import count, listed, plural, shortened
from memcalc.spec.segments import words
from memcalc.spec.spec import Spec
from memcalc.units import Unit, format_bytes

MAKERS = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel", "huawei": "Huawei"}

_NAMES = {
    "micro_batch_size": "micro-batch",
    "sequence_length": "sequence length",
    "layers": "layers",
    "parameters": "parameters",
}


def subject_lines(answer: Fit) -> list[str]:
    """The run, and where it is to fit."""
    system = answer.system
    where = f"{plural(answer.gpus, 'card')} {answer.card.name}"
    if answer.gpus > 1:
        where += f", {system.node} a node: {system.link}, {system.link_bytes / 1e9:g} GB/s"
    if answer.gpus > system.node:
        where += f"; between nodes {system.nic_bytes * 8 / 1e9:g} Gbit/s a card"
    known = answer.asked or (answer.best[0].result if answer.best else None)
    return [answer.name if known is None else subject(known).splitlines()[0], where]


def asked_sentence(answer: Fit, unit: Unit) -> str:
    """Whether the run fits as it is."""
    if answer.asked is None:
        return f"As it is, there is no such run: {answer.unasked}."
    spread = subject(answer.asked).rpartition("; ")[2]
    return f"As it is, on {spread}: {verdict(answer.asked, unit)}"


def layouts_sentence(answer: Fit) -> str:
    """How many layouts fit."""
    ranking = answer.ranking
    if ranking is None:
        return ""
    batch = f"for {plural(answer.sequences, 'sequence')} a step"
    if not ranking.fitting:
        if ranking.tried == 0:
            return "There is no layout: --why says what was left out."
        if ranking.undecided:
            return (
                f"None of {plural(ranking.tried, 'layout')} fits for sure, {batch}; {ranking.undecided:,} may: their "
                "memory is inside the range of recorded runs."
            )
        if ranking.tried == 1:
            return f"The only layout does not fit, {batch}."
        return f"None of {plural(ranking.tried, 'layout')} fits, {batch}."
    shown = "; the cheapest of each split" if len(answer.best) < len(ranking.fitting) else ""
    more = f" ({ranking.undecided:,} more may)" if ranking.undecided else ""
    return f"{len(ranking.fitting):,} of {plural(ranking.tried, 'layout')} fit{more}, {batch}{shown}:"


def minimum_sentence(answer: Fit, unit: Unit) -> str:
    """The answer to --minimize."""
    if answer.question.minimize == "gpus":
        if answer.fewest is None:
            bound = answer.question.gpus
            return f"No number of cards up to {bound or MOST_GPUS:,} is enough{'' if bound else ' (--gpus: up to N)'}."
        return f"{plural(answer.fewest, 'card')} at least: with fewer no layout fits."
    if answer.base is None:
        return asked_sentence(answer, unit)
    if answer.question.minimize == "gpu_kind":
        maker = MAKERS[answer.card.vendor]
        if answer.smallest is None:
            return f"No {maker} card of the table will do, {which_run(answer)}."
        return f"{answer.smallest.card.name} is the smallest {maker} card that will do, {which_run(answer)}."
    found = answer.least_recompute
    if found is None:
        assert answer.all_recomputed is not None, "it was tried"
        missing = verdict(answer.all_recomputed, unit).removeprefix("DOES NOT FIT: ")
        return f"To recompute all layers is not enough, {which_run(answer)}: {missing}"
    needed = f"{which_run(answer)}; needs {format_bytes(found.device_bytes, unit)}."
    if isinstance(found.recompute, str):
        return f"recompute = {found.recompute} is the least that fits, {needed}"
    return f"The first {found.layers} of {found.of} layers of each chunk is the least to recompute, {needed}"


def which_run(answer: Fit) -> str:
    """Which run maxima and minima are about."""
    if answer.base is None or not answer.base_is_best:
        return "everything else as it is"
    return f"everything else as in the cheapest layout: {layout_words(answer.base)}"


def layout_words(spec: Spec) -> str:
    """A layout in a few words."""
    parallelism = spec.parallelism
    degrees = ("tensor", "pipeline", "context", "expert", "data")
    parts = [f"{name} {size}" for name in degrees if (size := getattr(parallelism, f"{name}_parallel")) > 1]
    if parallelism.sequence_parallel:
        parts.append("sequence-parallel")
    if parallelism.virtual_stages > 1:
        parts.append(f"{parallelism.virtual_stages} chunks a stage")
    return ", ".join([*parts, f"ZeRO {parallelism.zero_stage}", f"recompute {words(spec.training.recompute)}"])


def maximum_lines(found: Maximum, unit: Unit) -> list[str]:
    """The largest value; then what it and the next one need, and what else there is to know."""
    size = f"{_NAMES[found.what]} {found.value:,}"
    if found.what == "parameters":
        size = f"{count(found.parameters)} parameters ({found.value:,} query heads)"
    lines = [size if found.value else f"{_NAMES[found.what]}: 0, for not even {found.next_value or 1:,} fits"]
    needed = None if found.result is None else found.result.headline.device_bytes
    if needed is not None:
        lines.append(f"needs {format_bytes(needed, unit)}; {_next(found, needed, unit)}")
    elif found.next_bytes is not None:
        lines.append(f"{found.next_value:,} needs {format_bytes(found.next_bytes, unit)}")
    elif found.end:
        lines.append(found.end)
    if found.is_close:
        lines.append("close: the GPU's memory is inside the interval of recorded runs, so it may fail")
    if found.result is not None and found.is_at_most:
        missing = holding_memory(found.result.limits)
        lines.append(f"at most: not modelled is {listed([limit.what for limit in missing])}")
    if found.gaps:
        lines.append(f"smaller values that do not fit: {', '.join(f'{gap:,}' for gap in found.gaps)}")
    if found.what == "parameters" and found.words:
        lines.append(f"--set takes it as {as_typed(found.words)}")
    if found.note and found.value:
        lines.append(found.note)
    return lines


def _next(found: Maximum, needed: int, unit: Unit) -> str:
    if found.next_value is None:
        return f"there is no larger one: {found.end}"
    if found.next_bytes is None:
        return f"{found.next_value:,} cannot be: {found.end}"
    following = format_bytes(found.next_bytes, unit)
    if following == format_bytes(needed, unit):  # the card ends between the two
        following = f"{found.next_bytes - needed:,} bytes more"
    return f"{found.next_value:,} does not fit: it needs {following}"


def nearest_title(answer: Fit) -> str:
    """Which run the changes are of; or that there are none."""
    run = "as it is" if answer.all_recomputed is None else "with all layers recomputed"
    if not answer.nearest:
        return f"None of the changes that are tried, alone or in pairs, makes the run fit {run}."
    return f"The smallest changes that make the run fit {run}"


def kind_of_change(found: Nearest) -> str:
    """What changes of its kind ask for, as a heading."""
    return _KINDS[found.change.result]


_KINDS = {
    SAME: "Same training result, same cards",
    MORE_GPUS: "Same training result, more GPUs",
    OTHER_CARD: "Same training result, another card",
    OTHER_RESULT: "Another training result",
}


def change_lines(found: Nearest, unit: Unit) -> tuple[str, str]:
    """The change as --set takes it; what is needed then, and at what price."""
    change = found.change
    time = "more card time a token, which the cost model does not know"
    if found.slowdown is not None:
        time = f"{round(100 * found.slowdown):+d}% card time a token by the cost model"
    return settings(change), f"then needs {format_bytes(change.needed, unit)}; price: {change.cost}; {time}"


def notes(answer: Fit, *, why: bool) -> list[str]:
    """What to know before one believes this."""
    found = []
    if answer.best and answer.question.maximize is None:
        found.append("costs rank layouts; they are no forecast: all rates are peaks, and nothing overlaps")
    if answer.system.assumed and answer.gpus > answer.system.node:
        found.append(answer.system.assumed)
    above = max((maximum.above for maximum in answer.maxima.values() if maximum.value), default=0)
    if above:
        values = "next value does" if above == 1 else f"{above} next values do"
        found.append(f"the largest fits, and the {values} not; a larger one still could fit only by chance")
    if answer.pruned and not why:
        found.append(f"{sum(answer.pruned.values()):,} choices were left out by rules: --why lists them")
    return [*found, *map(shortened, answer.notes)]
