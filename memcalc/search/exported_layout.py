"""The first layout of a search that fits as another program runs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from memcalc.errors import InputError
from memcalc.exporters.completion import Export, export
from memcalc.exporters.programs import PROGRAMS
from memcalc.ledger.result import Result
from memcalc.verdict.judge import size


class ExportedLayout(NamedTuple):
    """A layout in another program's file."""

    file: Export  # the file and its settings
    layout: Result  # the estimate of the layout
    result: Result  # the estimate of the run that the file describes, in its own program

    @property
    def more_bytes(self) -> int:
        """How much more device memory the file's program needs than the layout's program; negative: less."""
        return _device_bytes(self.result) - _device_bytes(self.layout)


def _device_bytes(result: Result) -> int:
    return result.headline.device_bytes or 0


def exported_layout(
    layouts: Sequence[Result], program: str, file: str | Path, model: str | None = None
) -> ExportedLayout:
    """Return the first layout that fits as the program runs it; if there is none, the first that it can run.

    Args:
        layouts: estimates of layouts, the best first; at least one.
        program: one of `PROGRAMS`.
        file: name of the file.
        model: as for `export`.

    Raises:
        InputError: as `export`.
    """
    able = [layout for layout in layouts if not PROGRAMS[program].refusal(layout.spec)]
    first, *others = able or layouts
    best = _exported(first, program, file, model)
    for layout in () if best.result.fits else others:
        with suppress(InputError):  # the file cannot describe this one
            found = _exported(layout, program, file, model)
            if found.result.fits:
                return found
    return best


def _exported(layout: Result, program: str, file: str | Path, model: str | None) -> ExportedLayout:
    written = export(layout.spec, program, file, model)
    return ExportedLayout(written, layout, size(written.spec))
