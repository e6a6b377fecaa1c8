"""Screen of `oom`: the cause, memory at the failure, and what to try."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.diagnosis.accounting import Check
from memcalc.diagnosis.advice import Advice
from memcalc.diagnosis.diagnosis import Diagnosis, Finding
from memcalc.diagnosis.report import LABELS, OutOfMemoryReport
from memcalc.diagnosis.sizes import PrintedSize
from memcalc.report.labels import HEADROOM, percent, plural
from memcalc.report.screen import (
    BAD,
    Column,
    Screen,
    TextTable,
    draw_bar,
    draw_grid,
    draw_line,
    draw_list,
    letter_bar,
    numeric,
)
from memcalc.report.screens.oom_changes import draw_explained
from memcalc.units import Unit, format_bytes, format_number

SHOWN = 20  # reports in the list; JSON has them all


def draw_diagnosis(screen: Screen, diagnosis: Diagnosis, unit: Unit) -> None:
    """Draw the screen of `memcalc oom`."""
    finding = diagnosis.finding
    draw_line(screen, subject(diagnosis, unit), 0)
    screen.line()
    draw_line(screen, verdict(finding, unit), 0, style=BAD)
    screen.line()
    _draw_parts(screen, finding, unit)
    draw_list(screen, "Holders", _holders(finding, unit))
    _draw_advice(screen, finding, unit)
    draw_list(
        screen, "Figures that do not agree", (_failure(check, unit) for check in finding.checks if not check.holds)
    )
    if diagnosis.explained is not None:
        draw_explained(screen, diagnosis.explained, unit)
    if len(diagnosis.findings) > 1:
        draw_grid(screen, reports_grid(diagnosis, unit))
    draw_list(screen, "Notes", _notes(diagnosis))


def subject(diagnosis: Diagnosis, unit: Unit) -> str:
    """Return the place in the log, the device and the request in one line."""
    report = diagnosis.finding.report
    asked = report.figures.asked
    amount = "" if asked is None else f", requested {format_bytes(asked.bytes, unit)}"
    tensor = f" for {report.tensor}" if report.tensor else ""
    sources = [*report.sources[:8], *([] if len(report.sources) <= 8 else ["..."])]
    who = f" ({', '.join(sources)})" if sources else ""
    when = f", in {report.phase.replace('_', ' ')}" if report.phase else ""
    times = "" if report.count == 1 else f"; {report.count:,} times"
    return (
        f"{diagnosis.log}:{report.line}: {LABELS[report.framework]} on {device_name(report)}{who}{when}"
        f"{amount}{tensor}{times}"
    )


def device_name(report: OutOfMemoryReport) -> str:
    """Return "cuda:0", or the type alone if the message has no index."""
    return report.device_type if report.device is None else f"{report.device_type}:{report.device}"


def parts(finding: Finding) -> list[tuple[str, str, PrintedSize, str]]:
    """Return the parts of the device's memory: letter, name, size, description."""
    account, label = finding.account, LABELS[finding.report.framework]
    rows = (
        ("A", "live tensors", account.live, f"allocated by {label}"),
        ("p", "private pools", account.private, "cached for CUDA graphs only"),
        ("s", "cached", account.cached, f"reserved by {label}, not allocated"),
        ("x", "this process", account.outside, f"outside {label}: context, libraries, communication"),
        ("o", "other processes", account.other_processes, "as listed in the message"),
        ("u", "not explained", account.unexplained, "contexts, libraries, unlisted processes"),
        (HEADROOM, "free", account.free, "reported by the driver"),
    )
    return [(mark, name, size, text) for mark, name, size, text in rows if size is not None]


def parts_grid(finding: Finding, unit: Unit) -> TextTable:
    """Return the table of memory at the failure."""
    capacity = finding.report.figures.capacity
    whole = 0 if capacity is None else capacity.bytes
    rows = [
        (mark, name, format_number(size.bytes, unit), percent(size.bytes, whole), text)
        for mark, name, size, text in parts(finding)
    ]
    strong = frozenset((len(rows),)) if capacity is not None else frozenset()
    if capacity is not None:
        rows.append(("", "capacity", format_number(whole, unit), "", ""))
    for name, figure, text in _apart(finding.report):
        rows.append(("", name, format_number(figure.bytes, unit), percent(figure.bytes, whole), text))
    columns = (Column(""), Column("part"), *numeric(unit, "share"))
    return TextTable("Memory at the failure", (*columns, Column("description", wrap=True)), rows, strong, letters=True)


def _apart(report: OutOfMemoryReport) -> Iterator[tuple[str, PrintedSize, str]]:
    figures = report.figures
    if figures.allowed is not None:
        yield "limit", figures.allowed, "limit of the allocator"
    if figures.reserved is not None and figures.allocated is None:
        yield "reserved", figures.reserved, f"held by {LABELS[report.framework]}"
    if figures.peak is not None:
        yield "peak", figures.peak, "highest allocated so far"
    if figures.exceeded is not None:
        yield "over", figures.exceeded, "as reported"
    for name, size in figures.buffers:
        yield name, size, "of the program that was run"
    if figures.asked is not None:
        yield "requested", figures.asked, "could not be allocated"


def _draw_parts(screen: Screen, finding: Finding, unit: Unit) -> None:
    grid = parts_grid(finding, unit)
    if not grid.rows:
        return
    cells = [(mark, size.bytes) for mark, _, size, _ in parts(finding)]
    if finding.report.figures.capacity is not None and len(cells) > 1:
        draw_bar(screen, letter_bar(cells, min(screen.width, 120) - 4))
        screen.line()
    draw_grid(screen, grid)


def _holders(finding: Finding, unit: Unit) -> Iterator[str]:
    for holder in finding.report.holders:
        own = " (this one, by its memory)" if holder.pid == finding.account.own_pid else ""
        yield f"process {holder.pid}: {format_bytes(holder.bytes.bytes, unit)}{own}"


def _draw_advice(screen: Screen, finding: Finding, unit: Unit) -> None:
    """Draw the remedies, the most promising first, with their gain and effect."""
    if not finding.advice:
        return
    screen.line(("Remedies", "bold"))
    for number, advice in enumerate(finding.advice, start=1):
        draw_line(screen, f"{number}. {advice.lever}{_gain(advice, unit)}", 2, style="bold")
        draw_line(screen, advice.effect, 5)
    screen.line()


def _gain(advice: Advice, unit: Unit) -> str:
    if advice.gain_bytes is None:
        return ""
    words = {True: ", enough for this request", False: ", not enough alone", None: ""}[advice.enough]
    return f" (up to {format_bytes(advice.gain_bytes, unit)}{words})"


def reports_grid(diagnosis: Diagnosis, unit: Unit) -> TextTable:
    """One line for each report of the log."""
    rows = [
        (
            f"{number}{'*' if number - 1 == diagnosis.chosen else ''}",
            str(finding.report.line),
            str(finding.report.count),
            device_name(finding.report),
            *(_size(figure, unit) for figure in _row_figures(finding)),
            finding.cause.name,
        )
        for number, finding in enumerate(diagnosis.findings[:SHOWN], start=1)
    ]
    heads = ("requested", "live", "cached", "available")
    columns = (Column(""), *numeric("line", "times"), Column("device"))
    sizes = tuple(Column(f"{head} {unit}" if head == "requested" else head, right=True) for head in heads)
    return TextTable("All reports (* explained above)", (*columns, *sizes, Column("cause", wrap=True)), rows)


def _row_figures(finding: Finding) -> tuple[PrintedSize | None, ...]:
    account = finding.account
    return (account.requested, account.live, account.cached, account.available)


def _size(figure: PrintedSize | None, unit: Unit) -> str:
    return "-" if figure is None else format_number(figure.bytes, unit)


def _failure(check: Check, unit: Unit) -> str:
    return f"{check.relation} fails by {format_bytes(check.off_bytes, unit)}: {check.meaning}"


def _notes(diagnosis: Diagnosis) -> Iterator[str]:
    if len(diagnosis.findings) > SHOWN:
        yield f"{len(diagnosis.findings) - SHOWN:,} further reports: see --format json"
    if diagnosis.not_kept:
        yield f"{plural(diagnosis.not_kept, 'further message')} with other figures not kept"
    if diagnosis.harmless:
        yield f"{plural(diagnosis.harmless, 'message')} say that the program continued; not counted above"
    if diagnosis.finding.report.wording == "cut short":
        yield "the message is truncated in the log: its other figures are missing"
    if len(diagnosis.findings) > 1:
        yield "the first report is explained, because later ones are often its consequence; --report N explains another"


def verdict(finding: Finding, unit: Unit) -> str:
    """Return the cause with its figures."""
    account, cause, report = finding.account, finding.cause, finding.report
    asked, cached, room = (_amount(figure, unit) for figure in (account.requested, account.cached, account.available))
    capacity = _amount(report.figures.capacity, unit)
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
    asked = _amount(account.requested, unit)
    if account.shortfall is None:
        return f"live tensors use {_amount(account.live, unit)}, and {asked} more did not fit."
    short = format_bytes(max(0, account.shortfall), unit)
    return f"{asked} requested, {_amount(account.available, unit)} available: {short} short."


def _pieces(finding: Finding, unit: Unit) -> str:
    """Return a sentence on cached memory, if the cause is not fragmentation."""
    cached = finding.account.cached
    if cached is None or not cached.bytes:
        return ""
    size = format_bytes(cached.bytes, unit)
    if finding.cause.fragmented:
        return f" The {size} cached in smaller blocks would not have been enough either."
    return f" The {size} cached in smaller blocks is within what healthy runs cache."


def _amount(figure: PrintedSize | None, unit: Unit) -> str:
    return "an unknown amount" if figure is None else format_bytes(figure.bytes, unit)
