"""Why memory ran out, in one or two sentences."""

from __future__ import annotations

from memcalc.diagnosis.diagnosis import Finding
from memcalc.diagnosis.report import LABELS
from memcalc.diagnosis.sizes import PrintedSize
from memcalc.units import Unit, format_bytes


def verdict(finding: Finding, unit: Unit) -> str:
    """Return the cause with its figures."""
    account, cause, report = finding.account, finding.cause, finding.report
    asked, cached, room = (_size(figure, unit) for figure in (account.requested, account.cached, account.available))
    capacity = _size(report.figures.capacity, unit)
    if cause.name == "fragmentation":
        return (
            f"FRAGMENTATION: {cached} is cached but split into blocks smaller than the {asked} requested. "
            f"As one block, with the {room} still free, it would have been enough."
        )
    if cause.name == "real need":
        return f"REAL NEED: {_shortfall(finding, unit)}{_pieces(finding, unit)}"
    if cause.name == "memory outside the framework":
        return (
            f"MEMORY OUTSIDE {LABELS[report.framework].upper()}: other processes or libraries use "
            f"{format_bytes(cause.outside, unit)}. "
            f"Without them the {asked} requested would fit into the device's {capacity}."
        )
    if cause.name == "a limit":
        return f"PER-PROCESS LIMIT: the {asked} request exceeds this process's memory limit; the device has enough."
    if cause.name == "refused":
        return f"REFUSED WITH ENOUGH MEMORY FREE: {asked} requested, {room} free; the message does not name the reason."
    if cause.name == "larger than the device":
        return f"LARGER THAN THE DEVICE: {asked} does not fit into {capacity}, even if nothing else is allocated."
    if cause.name == "host memory":
        return f"HOST MEMORY: the machine could not allocate {asked} of CPU memory; the device is not the cause."
    return "CAUSE UNKNOWN: the message lacks the figures that would show why."


def _shortfall(finding: Finding, unit: Unit) -> str:
    account = finding.account
    asked = _size(account.requested, unit)
    if account.shortfall is None:
        return f"live tensors use {_size(account.live, unit)}, and {asked} more did not fit."
    short = format_bytes(max(0, account.shortfall), unit)
    return f"{asked} requested, {_size(account.available, unit)} available: {short} short."


def _pieces(finding: Finding, unit: Unit) -> str:
    """Return a sentence on cached memory, if the cause is not fragmentation."""
    cached = finding.account.cached
    if cached is None or not cached.bytes:
        return ""
    size = format_bytes(cached.bytes, unit)
    if finding.cause.fragmented:
        return f" The {size} cached in smaller blocks would not have been enough either."
    return f" The {size} cached in smaller blocks is within what healthy runs cache."


def _size(figure: PrintedSize | None, unit: Unit) -> str:
    return "an unknown amount" if figure is None else format_bytes(figure.bytes, unit)
