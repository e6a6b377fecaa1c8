"""File of answers, one JSON line per cell, written as each cell ends: an interrupted sweep resumes from it."""

from __future__ import annotations

import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args

from memcalc.cells.cell import CellResult, GridCell, Outcome
from memcalc.errors import InputError
from memcalc.json_lines import JsonLines
from memcalc.text import message_part

CELLS = JsonLines("cell", 1, "cell of a sweep", "cells", "--cells", "sweep --by")

_VERDICTS = ("fits", "does-not-fit", "unknown", None)
_MOST_BYTES = 2**63  # bound of any figure; no memory is as large


class ResultFile:
    """The answers in a sweep's file.

    Args:
        path: the file; it need not exist.

    Raises:
        InputError: the file has other content, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        CELLS.check(path)
        self.path = path
        self.answers: dict[str, CellResult] = {}  # by digest of the cell
        for number, line in enumerate(CELLS.read(path) if path.is_file() else (), start=1):
            digest, answer = line.get("digest"), _answer(line)
            if answer is None or not isinstance(digest, str):
                raise InputError(
                    f"this line is not a {CELLS.one}: a value is missing or wrong.",
                    f"Name a file that `{CELLS.writer}` wrote.",
                    f"{path}:{number}",
                )
            self.answers[digest] = answer

    def find(self, cell: GridCell) -> CellResult | None:
        """Return the stored answer of a cell; None: there is none, or its process was killed."""
        answer = self.answers.get(cell.digest)
        return None if answer is None or answer.outcome == "lost" else answer

    def add(self, cell: GridCell, answer: CellResult) -> None:
        """Store an answer. It is on the disk when this returns.

        Raises:
            NotWritten: the disk is full.
        """
        line = {
            CELLS.key: CELLS.version,
            "digest": cell.digest,
            "by": cell.request["by"],
            "values": dict(cell.values),
            **asdict(answer),
        }
        CELLS.append((line,), self.path)


def _answer(line: dict[str, Any]) -> CellResult | None:
    """Return the answer of a line; None: a value is missing or wrong."""
    values: dict[str, Any] = {each.name: line.get(each.name) for each in fields(CellResult)}
    sizes = (value for name, value in values.items() if name.endswith("_bytes"))
    phase, seconds, reason = values["peak_phase"], values["seconds"], values["reason"]
    if (
        values["outcome"] not in get_args(Outcome)
        or values["verdict"] not in _VERDICTS
        or not all(size is None or (type(size) is int and abs(size) < _MOST_BYTES) for size in sizes)
        or not isinstance(phase, str | None)
        or not (type(seconds) in (int, float) and math.isfinite(seconds))
        or not isinstance(reason, str)
    ):
        return None
    return replace(CellResult(**values), reason=message_part(reason))
