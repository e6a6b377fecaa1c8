"""How far long work has come."""

import io
import itertools

import pytest

from memcalc.progress import EVERY, counted, silent
from memcalc.report.progress import PATIENCE, PAUSE, shown_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("items", "calls"),
    [(0, [0, 0]), (1, [0, 1]), (EVERY, [0, EVERY]), (2 * EVERY + 3, [0, EVERY, 2 * EVERY, 2 * EVERY + 3])],
)
def test_items_are_counted_from_the_first_to_the_last(items: int, calls: list[int]) -> None:
    told: list[tuple[str, int, int | None]] = []

    passed = list(counted(range(items), "allocator", lambda *call: told.append(call), items))

    assert passed == list(range(items))
    assert told == [("allocator", done, items) for done in calls]


def test_a_log_gets_nothing() -> None:
    file = io.StringIO()
    with shown_progress(file) as progress:
        progress("forward_1", 1, 2)

    assert progress is silent
    assert file.getvalue() == ""


def test_quick_work_stays_quiet() -> None:
    """The clock stands still: PATIENCE is never over."""
    file = Terminal()
    with shown_progress(file, clock=lambda: 0.0) as progress:
        for done in range(100):
            progress("forward_1", done, 100)

    assert file.getvalue() == ""


def test_long_work_is_shown_and_not_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is asked at 0, PATIENCE and then twice within each PAUSE: every second call is left out."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    file = Terminal()
    ticks = itertools.chain([0.0, PATIENCE], (PATIENCE + PAUSE * (0.5 + 0.75 * n) for n in itertools.count()))
    with shown_progress(file, clock=lambda: next(ticks)) as progress:
        for done in (10, 20, 30):
            progress("back[ward]_1", done, 60)

    text = file.getvalue()
    assert "back[ward]_1" in text  # names may hold square brackets
    assert "10/60" in text
    assert "20/60" not in text
    assert "30/60" in text
