"""A run as a file for other programs; the suffix decides which."""

from __future__ import annotations

from pathlib import Path

from memcalc.allocator import History
from memcalc.events import timeline, write_events
from memcalc.events.course import Course
from memcalc.report.plots.files import check_suffix

SUFFIXES = (".pickle", ".json", ".jsonl")


def course_of(history: History) -> Course:
    """The course of a run as an allocator saw it."""
    return Course(timeline(history.events), history.allocated, history.reserved)


def write_export(path: Path, history: History, name: str) -> None:
    """Writes a run for another program.

    Args:
        path: .pickle is a memory snapshot of PyTorch, for pytorch.org/memory_viz and torch.cuda._memory_viz; .json a
            Chrome trace, for ui.perfetto.dev and chrome://tracing; .jsonl memcalc's own events, for `memcalc replay`.
        history: the run.
        name: what it is called.

    Raises:
        InputError: for another suffix.
    """
    check_suffix(path, SUFFIXES)
    suffix = path.suffix.lower()
    if suffix == ".pickle":
        from memcalc.allocator.pytorch.dump import write_snapshot

        write_snapshot(path, history)
    elif suffix == ".json":
        from memcalc.events.chrome import write_chrome_trace

        write_chrome_trace(path, course_of(history), name)
    else:
        write_events(path, history.events)
