"""Plain output of commands, and the files that they write."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memcalc.cli.streams import exact
from memcalc.errors import NotWritten
from memcalc.text import json_safe


def print_json(document: Any) -> None:
    """Print a JSON document; non-ASCII characters are kept if the output can encode them."""
    import json  # a table needs none

    ascii_only = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    print_exactly(json_safe(json.dumps(document, indent=2, ensure_ascii=ascii_only)))


def print_text(text: str) -> None:
    """Print a text and a line break on standard output."""
    sys.stdout.write(text + "\n")


def print_exactly(text: str) -> None:
    """Print text of a format that is already safe: JSON, annotations of GitHub Actions."""
    exact(sys.stdout).write(text + "\n")


class WrittenFiles:
    """Files that a command writes in addition; a failure does not lose the output."""

    def __init__(self) -> None:
        self._failed: NotWritten | None = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Collect files that cannot be written; `complain` reports them after the result is printed."""
        try:
            yield
        except NotWritten as error:
            self._failed = self._failed or error
        except OSError as error:  # a directory without write permission, a pipe without a reader
            if error.filename is None:
                raise
            reason = error.strerror or str(error)
            self._failed = self._failed or NotWritten(error.filename, reason, "Name another file.")

    def complain(self) -> None:
        """Report the first file that could not be written.

        Raises:
            NotWritten: there was one.
        """
        if self._failed is not None:
            raise self._failed
