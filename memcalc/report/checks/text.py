"""Sentences that all formats of `check` share."""

from __future__ import annotations

from memcalc.checking.report import BUDGET, CheckOutcome, CheckReport, PeakGrowth, Status
from memcalc.report.labels import listed, plural, shortened
from memcalc.units import Unit, format_bytes

_FEW = 3  # paths that are named
HARMLESS = "no effect on memory"  # beginning of notes on fields that change nothing
NOTHING = "no configuration found: nothing was checked"
NOTHING_REMEDY = "Name a configuration file (a named file is always checked) or another directory."

# The words of the summary; then the rule that a config violates: its name in machine-readable formats, and its title.
ENDINGS: dict[Status, str] = {
    "fits": "fit",
    "does not fit": "too large",
    "unknown": "undecided",
    "grew": "grew",
    "broken": "invalid",
}
RULES: dict[Status, tuple[str, str]] = {
    "does not fit": ("does-not-fit", "memcalc: does not fit"),
    "unknown": ("cannot-say", "memcalc: cannot say"),
    "grew": ("grew", "memcalc: grew"),
    "broken": ("broken-config", "memcalc: invalid config"),
}


def summary(report: CheckReport) -> str:
    """Return one line: the number of configs by status, skipped files, and configs missing from this check.

    If the check fails because there is no config, the line ends with the remedy.
    """
    counts = [f"{report.count(status):,} {words}" for status, words in ENDINGS.items() if report.count(status)]
    parts = [f"{plural(len(report.outcomes), 'config')} checked: {', '.join(counts)}" if counts else NOTHING]
    if report.skipped:
        parts.append(f"{plural(report.skipped, 'other file')} skipped")
    if report.missing:
        parts.append(f"{len(report.missing)} of the baseline not checked")
    text = "; ".join(parts)
    return text if counts or not report.exit_code else f"{text}. {NOTHING_REMEDY}"


def place(outcome: CheckOutcome) -> str:
    """Return the file, and the line if it is known."""
    return outcome.path if outcome.line is None else f"{outcome.path}:{outcome.line}"


def sentence(outcome: CheckOutcome, unit: Unit) -> str:
    """Return the sentence about one config."""
    if outcome.sizes is None or outcome.needed_bytes is None or outcome.limit_bytes is None:
        return outcome.message
    least = "at least " if outcome.is_bound or outcome.unmodelled else ""
    needed = f"needs {least}{format_bytes(outcome.needed_bytes, unit)} ({outcome.basis}) per GPU"
    text = f"{needed} of {_limit(outcome, unit)}: {_rest(outcome, unit)}; peak in {outcome.sizes.peak_phase}"
    if outcome.unmodelled:
        text += f"; not modelled: {listed(outcome.unmodelled)}"
    return text if outcome.growth is None else f"{text}; {_change(outcome.growth, unit)}"


def _rest(outcome: CheckOutcome, unit: Unit) -> str:
    """Return the free or missing memory, or why it is unknown."""
    assert outcome.limit_bytes is not None
    assert outcome.needed_bytes is not None
    if outcome.status == "unknown":
        if outcome.unmodelled or outcome.interval is None:
            return "cannot say whether it fits"
        low, high = (format_bytes(size, unit) for size in outcome.interval)
        return f"cannot say whether it fits, recorded runs put it at {low} to {high}"
    free = outcome.limit_bytes - outcome.needed_bytes
    return f"{format_bytes(abs(free), unit)} {'free' if free >= 0 else 'over'}"


_SAID = 20  # notes of a screen


def notes(report: CheckReport) -> list[str]:
    """Return each note once, with the configs that it applies to."""
    found: dict[str, list[str]] = {}
    for outcome in report.outcomes:
        for note in outcome.notes:
            found.setdefault(note, []).append(outcome.path)
    alone = len(report.outcomes) == 1
    lines = [shortened(note) if alone else f"{shortened(note)} ({_paths_text(paths)})" for note, paths in found.items()]
    lines = [*report.remarks, *lines]
    more = len(lines) - _SAID
    return [*lines[:_SAID], f"and {more} more: see --format json"] if more > 0 else lines


def _paths_text(paths: list[str]) -> str:
    return ", ".join(paths) if len(paths) <= _FEW else f"{len(paths)} configurations"


def signed(difference: int, unit: Unit) -> str:
    """Return a change of bytes with its sign and unit; "no change" if it is zero."""
    if difference == 0:
        return "no change"
    return f"{'+' if difference > 0 else '-'}{format_bytes(abs(difference), unit)}"


def _limit(outcome: CheckOutcome, unit: Unit) -> str:
    assert outcome.limit_bytes is not None
    end = format_bytes(outcome.limit_bytes + outcome.margin_bytes, unit)
    words = f"{BUDGET} of {end}" if outcome.limit == BUDGET else f"{end} {outcome.limit}"
    return f"{words} less a margin of {format_bytes(outcome.margin_bytes, unit)}" if outcome.margin_bytes else words


def _change(growth: PeakGrowth, unit: Unit) -> str:
    if growth.difference == 0:
        return "unchanged since the baseline"
    text = f"{signed(growth.difference, unit)} ({growth.difference / growth.baseline:+.2%}) since the baseline"
    if growth.allowed is None or growth.difference <= growth.allowed:
        return text
    return f"{text}, of which {format_bytes(growth.allowed, unit)} are allowed"
