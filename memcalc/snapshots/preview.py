"""Short representation of a foreign file's value, for messages."""

from __future__ import annotations

from typing import Any

_LONGEST = 40  # characters of a string
_KEYS = 8  # of a dictionary
_LARGEST = 2**63


def shown(value: Any) -> str:
    """Return the type of a value, and a short value itself."""
    if isinstance(value, str | bytes):
        return repr(value[:_LONGEST])
    if isinstance(value, int):
        return str(min(abs(value), _LARGEST))
    if isinstance(value, float | None):
        return repr(value)
    if isinstance(value, dict):
        keys = ", ".join(sorted(str(key)[:20] for key in list(value)[:_KEYS]))
        return f"a dictionary with {keys or 'nothing in it'}"
    return f"a {type(value).__name__}"
