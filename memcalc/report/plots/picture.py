"""A figure of matplotlib as a picture file: PNG for screens, SVG for papers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc.files import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 100


def write_picture(path: Path, draw: Callable[[], Figure]) -> None:
    """Write the figure that `draw` returns as PNG or SVG, by the suffix of the path."""
    import matplotlib as mpl

    # The same run gives the same file, byte for byte; a dollar sign in a name is no formula.
    with mpl.rc_context({"svg.hashsalt": "memcalc", "font.size": 10, "text.parse_math": False}):
        figure = draw()
        metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": None}
        with writing(path) as file:
            figure.savefig(file, dpi=DOTS_PER_INCH, metadata=metadata, format=path.suffix.lower()[1:])
