"""Progress on a terminal: one line on standard error, removed when the work is done. Logs and pipes get none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from memcalc.progress import Progress, silent
from memcalc.text import harmless

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

PATIENCE = 0.5  # seconds that pass before anything is shown: quick work stays quiet
PAUSE = 0.1  # seconds between two drawings


@contextmanager
def shown_progress(file: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """Yield a progress callback, drawn on `file` (default: standard error) if that is a terminal."""
    file = sys.stderr if file is None else file
    if not file.isatty():
        yield silent
        return
    line = _Line(file, clock)
    try:
        yield line
    finally:
        line.close()


class _Line:
    """A line that is redrawn."""

    def __init__(self, file: TextIO, clock: Callable[[], float]) -> None:
        self._file = file
        self._clock = clock
        self._next = clock() + PATIENCE
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __call__(self, what: str, done: int, total: int | None = None) -> None:
        now = self._clock()
        if now < self._next:
            return
        self._next = now + PAUSE
        if self._bar is None or self._task is None:
            self._bar, self._task = self._open()
        self._bar.update(self._task, description=harmless(what), completed=done, total=total)
        self._bar.refresh()

    def _open(self) -> tuple[Bar, TaskID]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        bar = Bar(*columns, TimeElapsedColumn(), console=Console(file=self._file), transient=True, auto_refresh=False)
        bar.start()
        return bar, bar.add_task("", total=None)

    def close(self) -> None:
        """Erase the line."""
        if self._bar is not None:
            self._bar.stop()
