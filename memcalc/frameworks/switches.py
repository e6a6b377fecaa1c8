"""Values that count as true in configs of Hugging Face's libraries."""

from __future__ import annotations


def is_on(value: object) -> bool:
    """Return whether a switch is on, or left to the framework, which then switches it on where it can."""
    return value in (True, "true", "auto", "full")
