"""Reads a message part after part, each where the last one ended: linear in its length, whatever stands there."""

from __future__ import annotations

import re

# A part of a message is shorter than this; with less text left, the rest may still be on the next line.
LONGEST_PART = 200


class Cursor:
    """A place in a text without blanks."""

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The pattern right here; the place moves behind it."""
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def skip_to(self, pattern: re.Pattern[str], within: int = LONGEST_PART) -> re.Match[str] | None:
        """The pattern a few letters further on; the place moves behind it."""
        found = pattern.search(self.text, self.at, self.at + within)
        if found is not None:
            self.at = found.end()
        return found
