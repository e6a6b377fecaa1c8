"""`[ ]`, `[[ ]]` and `test`: true, false, or unknown from the script's text."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from fnmatch import fnmatchcase

from memcalc.importers.shell.arithmetic import computed
from memcalc.importers.shell.marks import is_open

_NUMBERS = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


def decided(words: Sequence[str], *, patterns: bool) -> bool | None:
    """Return whether a condition holds; None if unknown.

    Args:
        words: the expanded words between the brackets.
        patterns: whether `==` compares with a pattern, as in `[[ ]]`.
    """
    for joints, combine in ((("||", "-o"), any_of), (("&&", "-a"), all_of)):
        for place in range(1, len(words) - 1):
            if words[place] in joints:
                left = decided(words[:place], patterns=patterns)
                return combine(left, decided(words[place + 1 :], patterns=patterns))
    if words and words[0] == "!":
        inner = decided(words[1:], patterns=patterns)
        return None if inner is None else not inner
    if len(words) > 2 and (words[0], words[-1]) in (("(", ")"), ("\\(", "\\)")):
        return decided(words[1:-1], patterns=patterns)
    return _simple(words, patterns)


def _simple(words: Sequence[str], patterns: bool) -> bool | None:
    if not words:
        return False
    if len(words) == 1:
        return None if is_open(words[0]) else words[0] != ""
    if len(words) == 2:
        if words[0] not in ("-z", "-n") or is_open(words[1]):
            return None
        return (words[1] == "") is (words[0] == "-z")
    if len(words) != 3 or is_open(words[0]) or is_open(words[2]):
        return None
    left, middle, right = words
    if middle in ("=", "==", "!="):
        same = fnmatchcase(left, right) if patterns else left == right
        return same is (middle != "!=")
    if middle in _NUMBERS:
        a, b = computed(left), computed(right)
        return None if a is None or b is None else bool(_NUMBERS[middle](a, b))
    return None


def any_of(left: bool | None, right: bool | None) -> bool | None:
    """Return the `or` of conditions: true if one holds, even if others are unknown (None)."""
    return True if left or right else None if left is None or right is None else False


def all_of(left: bool | None, right: bool | None) -> bool | None:
    """Return the `and` of conditions: false if one does not hold, even if others are unknown (None)."""
    return False if left is False or right is False else None if left is None or right is None else True
