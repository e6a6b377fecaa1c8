"""Assembly of reports: repeated messages are one report, and scattered parts are merged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from memcalc.diagnosis.report import MessageFigures, OutOfMemoryReport

MOST_REPORTS = 1000  # distinct reports to keep; a run that survives its failures may have many more
_MOST_SPEAKERS = 64  # log sources listed per report

_BFC = "BFC allocator"
_FRAGMENTS = ("pool", "stats")


@dataclass
class Collection:
    """The reports of a log."""

    # the distinct ones, in the order of their first occurrence
    reports: list[OutOfMemoryReport] = field(default_factory=list)
    not_kept: int = 0  # number of further messages
    harmless: int = 0  # number of messages that report that the program continued


def collect(messages: Iterable[OutOfMemoryReport]) -> Collection:
    """Return the reports of a log; harmless messages only if there is nothing else."""
    collection, harmless = _ReportCollector(), _ReportCollector()
    for message in messages:
        (collection if message.fatal else harmless).add(message)
    found, other = collection.result(), harmless.result()
    found.harmless = sum(report.count for report in other.reports) + other.not_kept
    if not found.reports:
        found.reports, found.not_kept = other.reports, other.not_kept
    return found


class _ReportCollector:
    def __init__(self) -> None:
        self._reports: dict[tuple[object, ...], _Occurrences] = {}
        self._not_kept = 0
        # By log source: an allocator's message before its exception has appeared.
        self._open: dict[str, OutOfMemoryReport] = {}
        self._whole: dict[str, OutOfMemoryReport] = {}  # by log source: the last report merged from both

    def result(self) -> Collection:
        for speaker in list(self._open):
            self._close(speaker)
        ordered = sorted((each.report() for each in self._reports.values()), key=lambda report: report.line)
        return Collection(ordered, self._not_kept)

    def add(self, message: OutOfMemoryReport) -> None:
        speaker = message.sources[0] if message.sources else ""
        if message.wording in _FRAGMENTS:
            begun = self._open.get(speaker) or replace(message, wording=_BFC, figures=MessageFigures())
            self._open[speaker] = replace(begun, figures=_completed(begun.figures, message.figures))
        elif message.wording == _BFC and message.fatal:
            self._close(speaker)
            self._open[speaker] = message
        elif message.framework in ("tensorflow", "xla"):
            self._add_exception(speaker, message)
        else:
            self._keep(message)

    def _add_exception(self, speaker: str, message: OutOfMemoryReport) -> None:
        """Merge an exception with the allocator's message before it; a repetition is the same report."""
        begun = self._open.pop(speaker, None)
        if begun is not None:
            message = replace(
                message,
                figures=_completed(message.figures, begun.figures),
                device=begun.device if message.device is None else message.device,
                operator=message.operator or begun.operator,
                line=min(message.line, begun.line),
            )
            self._whole[speaker] = message
        else:
            whole = self._whole.get(speaker)
            if whole is not None and (whole.tensor, whole.figures.asked) == (
                message.tensor,
                message.figures.asked,
            ):
                message = replace(whole, phase=whole.phase or message.phase)
        self._keep(message)

    def _close(self, speaker: str) -> None:
        begun = self._open.pop(speaker, None)
        if begun is not None and begun.figures.asked is not None:
            self._keep(begun)

    def _keep(self, message: OutOfMemoryReport) -> None:
        content = message.content
        known = self._reports.get(content)
        if known is not None:
            known.add(message)
        elif len(self._reports) < MOST_REPORTS:
            self._reports[content] = _Occurrences(message)
        else:
            self._not_kept += 1


class _Occurrences:
    """A report and its repetitions: one object for all, since a log may repeat a line a million times."""

    __slots__ = ("count", "first", "phase", "sources")

    def __init__(self, first: OutOfMemoryReport) -> None:
        self.first = first
        self.count = first.count
        self.phase = first.phase
        self.sources = dict.fromkeys(first.sources)

    def add(self, message: OutOfMemoryReport) -> None:
        self.count += message.count
        self.phase = self.phase or message.phase
        if message.sources and len(self.sources) < _MOST_SPEAKERS:
            self.sources.update(dict.fromkeys(message.sources))

    def report(self) -> OutOfMemoryReport:
        """Return the first occurrence, with the count, sources and phase of all."""
        sources = tuple(self.sources)[:_MOST_SPEAKERS]
        return replace(self.first, count=self.count, sources=sources, phase=self.phase)


def _completed(figures: MessageFigures, more: MessageFigures) -> MessageFigures:
    """Return the figures, filled in with those of `more`."""
    missing: dict[str, Any] = {
        name: figure for name, figure in more.by_name().items() if getattr(figures, name) is None
    }
    return replace(figures, **missing)
