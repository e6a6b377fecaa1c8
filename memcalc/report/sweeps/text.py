"""Sentences about the verdicts of a sweep."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.report.labels import listed, plural
from memcalc.sweeping.pareto_front import GrowthAxes
from memcalc.sweeping.replays import MOST_OF_FRONT
from memcalc.sweeping.table import Table
from memcalc.sweeping.verdict_terms import ANSWERS, VerdictTerms


def answer_text(table: Table, number: int) -> str:
    """Return "fits", "close" or "does not fit" for a configuration with a verdict."""
    return ANSWERS[int(table.verdict[number])].replace("-", " ")


def verdict_notes(table: Table) -> Iterator[str]:
    """Yield the number of replays, and why configurations are close, once per type of run."""
    replays = int(table.replayed.sum())
    if replays:
        yield f"{plural(replays, 'configuration')} replayed through a model of the PyTorch allocator."
    waiting = int((GrowthAxes(table).members() & table.can_replay & ~table.replayed).sum())
    if waiting:
        yield f"{waiting:,} of the Pareto front not replayed: the front gets at most {MOST_OF_FRONT} replays."
    unmodelled = {terms.unmodelled: None for terms in table.terms(table.valid) if terms.unmodelled}
    for names in unmodelled:
        yield f"Not modelled, so no configuration is certain to fit: {listed(names)}."
    sentences: dict[str, None] = {}
    for terms in table.terms(table.close & ~table.replayed):
        if not terms.unmodelled:
            hint = "Add --replay N to replay the N closest." if terms.replays else "These cannot be replayed."
            sentences[f"Close: {_range(terms)} {hint}"] = None
    for terms in table.terms(table.close & table.replayed):
        if not terms.unmodelled:
            sentences["Close after a replay: usable memory is inside the error range of recorded replays."] = None
    yield from sentences


def _range(terms: VerdictTerms) -> str:
    errors = terms.errors
    low, high = terms.ratio * (1 + errors.low), terms.ratio * (1 + errors.high)
    span = f"{low:.2f} to {high:.2f} times the allocated memory"
    if not errors.runs:
        return f"usable memory is inside {span}, a default: too few runs were recorded ({errors.run_type})."
    return f"usable memory is inside {span}, the range of {errors.runs} recorded runs ({errors.run_type})."
