"""What follows from a spec alone, asked for again and again while one run is sized."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from memcalc.spec.spec import Spec

Found = TypeVar("Found")

FEW = 4  # specs whose results are kept: one run is sized at a time, and its variants of a moment


def remembered(function: Callable[[Spec], Found]) -> Callable[[Spec], Found]:
    """The function, which keeps its last results by the identity of the spec: hashing one takes longer than most."""
    known: deque[tuple[Spec, Found]] = deque(maxlen=FEW)

    @wraps(function)
    def of(spec: Spec) -> Found:
        for other, found in known:
            if other is spec:
                return found
        found = function(spec)
        known.appendleft((spec, found))
        return found

    return of
