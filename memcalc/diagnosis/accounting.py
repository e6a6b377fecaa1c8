"""Accounting of the device's memory at a failed request, from one message's figures, and whether these agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memcalc.diagnosis.report import OutOfMemoryReport
from memcalc.diagnosis.sizes import NOTHING, PrintedSize, total


class Account(NamedTuple):
    """Parts of the device's memory; None if the message lacks them.

    `live` + `private` + `cached` = reserved memory. With `outside`, `other_processes`, `unexplained` and `free` they
    add up to the capacity, if all are known.
    """

    requested: PrintedSize | None
    live: PrintedSize | None  # in tensors
    private: PrintedSize | None  # cached in private pools
    cached: PrintedSize | None  # reserved, not allocated, and without a large enough contiguous block
    outside: PrintedSize | None  # of this process, outside its framework's allocator
    other_processes: PrintedSize | None  # of other processes in the message
    unexplained: PrintedSize | None  # in use on the device, but not attributed by the message
    free: PrintedSize | None
    available: PrintedSize | None  # what the allocator could still have reserved: free memory, within its limit
    own_pid: int | None  # the listed process that must be this one, under its pid outside a container

    @property
    def shortfall(self) -> int | None:
        """The missing bytes; negative if there was enough memory."""
        if self.requested is None or self.available is None:
            return None
        return self.requested.bytes - self.available.bytes

    @property
    def usable_if_contiguous(self) -> PrintedSize | None:
        """The memory available to a request if the cache were contiguous."""
        if self.cached is None:
            return None
        return self.cached.plus(self.available or NOTHING)


def account_of(report: OutOfMemoryReport) -> Account:
    """Return the parts of the device's memory that the message gives."""
    figures = report.figures
    reserved, live = figures.reserved, figures.allocated
    if reserved is None and figures.allowed is not None and report.framework in ("tensorflow", "xla"):
        reserved = figures.allowed  # BFC reserves its whole limit at once, unless allow_growth is set
    cached = None
    if reserved is not None and live is not None:
        cached = _at_least_nothing(reserved.minus(live).minus(figures.private or NOTHING))
    own_pid, process, others = _processes(report)
    outside = figures.elsewhere
    if process is not None and reserved is not None and process.high >= reserved.low:
        outside = _at_least_nothing(process.minus(reserved))
    return Account(
        requested=figures.asked,
        live=live,
        private=figures.private,
        cached=cached,
        outside=outside,
        other_processes=others,
        unexplained=_unexplained(report, [outside or NOTHING, others or NOTHING]),
        free=figures.free,
        available=_room(report, reserved),
        own_pid=own_pid,
    )


def _processes(report: OutOfMemoryReport) -> tuple[int | None, PrintedSize | None, PrintedSize | None]:
    """Return the pid of this process if it is listed, its memory, and the memory of the other processes.

    In a container the driver lists this process under its pid outside, which PyTorch does not recognize. It must be the
    process without which the total would exceed the memory in use on the device.
    """
    figures, holders = report.figures, report.holders
    if figures.process is not None or not holders:
        return None, figures.process, total([holder.bytes for holder in holders]) if holders else None
    if figures.capacity is None or figures.free is None or figures.reserved is None:
        return None, None, total([holder.bytes for holder in holders])
    used = figures.capacity.minus(figures.free)
    together = total([holder.bytes for holder in holders]).plus(figures.reserved)
    candidates = [holder for holder in holders if holder.bytes.high >= figures.reserved.low]
    if together.low <= used.high or not candidates:
        return None, None, total([holder.bytes for holder in holders])
    own = min(candidates, key=lambda holder: holder.bytes.bytes)
    rest = [holder.bytes for holder in holders if holder is not own]
    return own.pid, own.bytes, total(rest) if rest else None


def _unexplained(report: OutOfMemoryReport, explained: list[PrintedSize]) -> PrintedSize | None:
    figures = report.figures
    if figures.capacity is None or figures.free is None or figures.reserved is None:
        return None
    rest = figures.capacity.minus(figures.free).minus(figures.reserved).minus(total(explained))
    return _at_least_nothing(rest)


def _room(report: OutOfMemoryReport, reserved: PrintedSize | None) -> PrintedSize | None:
    figures = report.figures
    held = reserved if figures.elsewhere is None else (figures.allocated or NOTHING).plus(figures.elsewhere)
    within = None
    if figures.allowed is not None and held is not None:
        within = _at_least_nothing(figures.allowed.minus(held))
    known = [room for room in (figures.free, within) if room is not None]
    return min(known, key=lambda room: room.bytes) if known else None


def _at_least_nothing(figure: PrintedSize) -> PrintedSize:
    return figure if figure.bytes >= 0 else PrintedSize(0, figure.slack)


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
