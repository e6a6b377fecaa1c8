"""Cursor that parses a message part by part, in time linear in its length."""

from __future__ import annotations

import re

# Upper bound for a part of a message, in characters; with less text left, the rest may be on the next line.
LONGEST_PART = 200


class Cursor:
    """A position in a text without whitespace."""

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match the pattern at the position, and advance past it."""
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def skip_to(self, pattern: re.Pattern[str], within: int = LONGEST_PART) -> re.Match[str] | None:
        """Search the pattern in the next characters, and advance past it."""
        found = pattern.search(self.text, self.at, self.at + within)
        if found is not None:
            self.at = found.end()
        return found
