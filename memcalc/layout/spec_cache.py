"""Cache of results that depend on a spec alone and are requested many times in one estimate."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from memcalc.spec.spec import Spec

Found = TypeVar("Found")

FEW = 4  # cached specs: one run at a time, and its temporary variants


def cached_by_spec(function: Callable[[Spec], Found]) -> Callable[[Spec], Found]:
    """Return the function with a cache of its last results, keyed by the identity of the spec.

    Hashing a spec takes longer than most of these functions.
    """
    known: tuple[tuple[Spec, Found], ...] = ()  # replaced, never changed: other threads may read it

    @wraps(function)
    def of(spec: Spec) -> Found:
        nonlocal known
        for other, found in known:
            if other is spec:
                return found
        found = function(spec)
        known = ((spec, found), *known[: FEW - 1])
        return found

    return of
