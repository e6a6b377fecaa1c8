"""Consistency of a message's figures, within the rounding of printed digits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memcalc.diagnosis.accounting import Account
from memcalc.diagnosis.report import OutOfMemoryReport
from memcalc.diagnosis.sizes import NOTHING, PrintedSize, total


class Check(NamedTuple):
    """One relation that must hold between figures."""

    relation: str  # as text, such as "allocated <= reserved"
    holds: bool  # whether it holds
    off_bytes: int  # the violation in bytes; 0 if it holds
    meaning: str  # what a violation means for the run


def checks(report: OutOfMemoryReport, account: Account) -> tuple[Check, ...]:
    """Return every relation that the given figures allow to check."""
    return tuple(_checks(report, account))


def _checks(report: OutOfMemoryReport, account: Account) -> Iterator[Check]:
    figures = report.figures
    allocated, reserved, capacity = figures.allocated, figures.reserved, figures.capacity
    held = None if allocated is None else allocated.plus(figures.private or NOTHING)
    yield from _at_most("allocated <= reserved", held, reserved, "the message contradicts itself")
    paged = "more is allocated than the device has: the driver pages to host memory (Windows, WSL), which is slow"
    yield from _at_most("reserved <= capacity", reserved if reserved is not None else allocated, capacity, paged)
    if reserved is not None and figures.free is not None and not _exceeds(reserved, capacity):
        yield from _at_most(
            "reserved + free <= capacity", reserved.plus(figures.free), capacity, "the message contradicts itself"
        )
    yield from _at_most(
        "reserved <= this process",
        reserved,
        figures.process,
        "the driver does not see all of this process (containers, Windows): the line about this process is unreliable",
    )
    if report.holders and capacity is not None and figures.free is not None:
        listed = [holder.bytes for holder in report.holders]
        yield from _at_most(
            "processes + free <= capacity",
            total([*listed, figures.process or NOTHING, figures.free]),
            capacity,
            "processes started or ended while the message was written",
        )
    yield from _at_most("allocated <= limit", held, figures.allowed, "the message contradicts itself")
    yield from _at_most("allocated <= peak", allocated, figures.peak, "the message contradicts itself")
    if figures.exceeded is not None and figures.asked is not None and capacity is not None:
        yield from _equal("used - capacity = exceeded", figures.asked.minus(capacity), figures.exceeded)
    if account.requested is not None and account.available is not None and report.device_type != "tpu":
        short = account.available.low < account.requested.high
        refused = "the request fits into the available memory, so another limit rejected it"
        yield _check("requested > available", short, -(account.shortfall or 0), refused)


def _exceeds(figure: PrintedSize, bound: PrintedSize | None) -> bool:
    return bound is not None and figure.low > bound.high


def _at_most(relation: str, figure: PrintedSize | None, bound: PrintedSize | None, meaning: str) -> Iterator[Check]:
    if figure is not None and bound is not None:
        yield _check(relation, not _exceeds(figure, bound), figure.bytes - bound.bytes, meaning)


def _equal(relation: str, figure: PrintedSize, other: PrintedSize) -> Iterator[Check]:
    off = abs(figure.bytes - other.bytes)
    yield _check(relation, off <= figure.slack + other.slack, off, "the message contradicts itself")


def _check(relation: str, holds: bool, off: int, meaning: str) -> Check:
    return Check(relation, holds, 0 if holds else off, "" if holds else meaning)
