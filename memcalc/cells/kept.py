"""Answers in a file, a line of JSON for each cell from the moment that it ends: an interrupted sweep goes on there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

from memcalc.cells.cell import Answer, Cell
from memcalc.errors import InputError, NotWritten

SCHEMA_VERSION = 1


class Kept:
    """The file of a sweep's answers.

    Lines that are not whole, as of a full disk or a power failure, are ignored.

    Args:
        path: the file; it need not exist.

    Raises:
        InputError: the file is something else.
        NotWritten: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[str, Answer] = {}  # by the digests of their cells
        names = {each.name for each in fields(Answer)}
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            lines = []
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}.", "Name a file.", "--cells") from None
        for number, line in enumerate(lines):
            try:
                found = json.loads(line)
                digest = found["digest"]
                self.answers[digest] = Answer(**{name: found[name] for name in names})
            except (ValueError, KeyError, TypeError):
                if number == 0 and len(lines) > 1:
                    raise InputError(f"{path} has no cells of a sweep.", "Name another file.", "--cells") from None
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise NotWritten(str(path), error.strerror or str(error), "Name another file with --cells.") from None
        if lines and not path.read_bytes().endswith(b"\n"):
            os.write(self._file, b"\n")

    def find(self, cell: Cell) -> Answer | None:
        """Return the kept answer of a cell; None: there is none, or its process was killed."""
        answer = self.answers.get(cell.digest)
        return None if answer is None or answer.outcome == "lost" else answer

    def add(self, cell: Cell, answer: Answer) -> None:
        """Keep an answer. It is on the disk when this returns.

        Raises:
            NotWritten: the disk is full.
        """
        line: Mapping[str, object] = {
            "schema_version": SCHEMA_VERSION,
            "digest": cell.digest,
            "by": cell.request["by"],
            "values": dict(cell.values),
            **asdict(answer),
        }
        try:
            os.write(self._file, json.dumps(line).encode() + b"\n")
            os.fsync(self._file)
        except OSError as error:
            raise NotWritten(str(self.path), error.strerror or str(error), "Free space there.") from None

    def close(self) -> None:
        """The sweep has ended."""
        os.close(self._file)
