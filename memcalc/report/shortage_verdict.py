"""Why memory ran out, in one or two sentences."""

from __future__ import annotations

from memcalc.diagnosis.diagnosis import Finding
from memcalc.diagnosis.report import LABELS
from memcalc.diagnosis.sizes import Printed
from memcalc.units import Unit, format_bytes


def verdict(finding: Finding, unit: Unit) -> str:
    """The cause with its figures."""
    account, cause, report = finding.account, finding.cause, finding.report
    asked, cached, room = (_size(figure, unit) for figure in (account.asked, account.cached, account.room))
    capacity = _size(report.figures.capacity, unit)
    if cause.name == "fragmentation":
        return (
            f"FRAGMENTATION: {cached} cached but unusable, in pieces too small for the {asked} asked for. "
            f"In one piece, with the {room} still to be had, it would have been enough."
        )
    if cause.name == "real need":
        return f"REAL NEED: {_shortfall(finding, unit)}{_pieces(finding, unit)}"
    if cause.name == "memory outside the framework":
        return (
            f"MEMORY OUTSIDE {LABELS[report.framework].upper()}: {format_bytes(cause.outside, unit)} held by others. "
            f"Without them the {asked} asked for would have fitted into the device's {capacity}."
        )
    if cause.name == "a limit":
        return f"A LIMIT: the {asked} asked for go beyond what this run may take, not beyond what the device has."
    if cause.name == "refused":
        return f"REFUSED WITH ROOM TO SPARE: {asked} asked for, {room} free; the message does not say what refused it."
    if cause.name == "larger than the device":
        return f"LARGER THAN THE DEVICE: {asked} do not fit into {capacity}, whatever else is there."
    if cause.name == "host memory":
        return f"HOST MEMORY: the machine could not give {asked}; the device is not the matter."
    return "NOT TOLD: the message lacks the figures that would show why."


def _shortfall(finding: Finding, unit: Unit) -> str:
    account = finding.account
    asked = _size(account.asked, unit)
    if account.shortfall is None:
        return f"live tensors hold {_size(account.live, unit)}, and {asked} more did not fit."
    short = format_bytes(max(0, account.shortfall), unit)
    return f"{asked} asked for, {_size(account.room, unit)} to be had: {short} too little."


def _pieces(finding: Finding, unit: Unit) -> str:
    """What the cache has to do with it, where it is not the cause."""
    cached = finding.account.cached
    if cached is None or not cached.bytes:
        return ""
    size = format_bytes(cached.bytes, unit)
    if finding.cause.fragmented:
        return f" The {size} cached in pieces would not have been enough either."
    return f" The {size} cached in pieces are no more than healthy runs have."


def _size(figure: Printed | None, unit: Unit) -> str:
    return "an unknown amount" if figure is None else format_bytes(figure.bytes, unit)
