"""Picks what draws a picture by the suffix of its file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from memcalc.errors import InputError
from memcalc.events.course import Course
from memcalc.report.grid import Grid
from memcalc.units import Unit

SUFFIXES = (".png", ".svg", ".html")


def check_suffix(path: Path, known: tuple[str, ...] = SUFFIXES) -> None:
    """Refuses a file that nothing could write, before hours are spent on what would go into it.

    Raises:
        InputError: for a suffix that is not known.
    """
    if not path.name.lower().endswith(known):
        found = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
        raise InputError(f"{path.name} {found}.", f"The suffix decides what is written: {', '.join(known)}.")


def write_plot(
    path: Path,
    course: Course,
    title: str,
    unit: Unit = "GiB",
    tables: Callable[[], Iterable[Grid]] = tuple,
) -> None:
    """Writes the picture of a run.

    Args:
        path: .png and .svg are drawn by matplotlib, .html needs nothing.
        course: what is drawn.
        title: its heading.
        unit: of all numbers.
        tables: what a page shows below the picture.

    Raises:
        InputError: for another suffix.
        Unavailable: matplotlib is needed and not installed.
    """
    check_suffix(path)
    if path.suffix.lower() == ".html":
        from memcalc.report.plots.page import course_page

        path.write_text(course_page(course, title, unit, tables()), encoding="utf-8")
    else:
        from memcalc.report.plots.figure import save_figure

        save_figure(path, course, title, unit)
