"""Picks what draws a picture by the suffix of its file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from memcalc.errors import InputError, Unavailable
from memcalc.events.memory_curve import MemoryCurve
from memcalc.extras import installation
from memcalc.files import write_json, write_text
from memcalc.ledger.result import Source
from memcalc.report.screen import TextTable
from memcalc.units import Unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg")
SUFFIXES = (*PICTURES, ".html", ".json")


def check_target(path: Path, known: tuple[str, ...] = SUFFIXES) -> None:
    """Refuses a file that nothing could write, before time is spent on what would go into it.

    Raises:
        InputError: for an unknown suffix, or a missing directory.
        Unavailable: a picture needs matplotlib, and it is not installed.
    """
    check_place(path, known)
    if path.suffix.lower() in PICTURES:
        _require_matplotlib(f"{path.name}: PNG and SVG are")


def curve_figure(curve: MemoryCurve, title: str, unit: Unit = "GiB") -> Figure:
    """Return the picture of a run as a figure of matplotlib.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    _require_matplotlib("Figures are")
    from memcalc.report.plots import matplotlib_figure

    return matplotlib_figure.curve_figure(curve, title, unit)


def _require_matplotlib(what: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise Unavailable(
            f"{what} drawn by matplotlib, which is not installed. Run: {installation('plot')}. A page (.html) needs "
            "nothing."
        )


def check_place(path: Path, known: tuple[str, ...]) -> None:
    """Reject a file with an unknown suffix, or in a missing directory.

    Raises:
        InputError: with the suffixes that are known.
    """
    suffix = path.suffix.lower()
    if suffix not in known:
        found = f"ends in {path.suffix!r}" if suffix else "has no suffix"
        raise InputError(f"{path.name} {found}.", f"The suffix decides what is written: {', '.join(known)}.")
    if not path.parent.is_dir():
        raise InputError(f"{path}: no directory {path.parent}.", "Create it first, or choose another.")


def write_plot(
    path: Path | str,
    curve: MemoryCurve,
    title: str,
    unit: Unit = "GiB",
    tables: Callable[[], Iterable[TextTable]] = tuple,
    source: Source = "trace",
) -> None:
    """Write the plot of a run.

    Args:
        path: .png and .svg are drawn by matplotlib, .html needs nothing; .json has the timeline's document.
        curve: the memory curve to draw.
        title: its heading.
        unit: of all numbers.
        tables: what a page shows below the picture.
        source: of the run, for its document.

    Raises:
        InputError: as `check_target`.
        Unavailable: matplotlib is not installed.
    """
    path = Path(path)
    check_target(path)
    if path.suffix.lower() == ".json":
        from memcalc.documents.timeline import timeline_document

        write_json(path, timeline_document(curve, title, source))
    elif path.suffix.lower() == ".html":
        from memcalc.report.plots.html import curve_page

        write_text(path, curve_page(curve, title, unit, tables()))
    else:
        from memcalc.report.plots.matplotlib_figure import save_figure

        save_figure(path, curve, title, unit)
