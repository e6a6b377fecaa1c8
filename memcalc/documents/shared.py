"""Parts that several documents have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import GetPydanticSchema
from typing_extensions import TypedDict

from memcalc.ledger.component import Component
from memcalc.ledger.verdict import Verdict
from memcalc.spec.limits import Limit, Overcount
from memcalc.spec.spec import Spec

SCHEMA_VERSION: Literal[2] = 2

Keys = TypeVar("Keys")  # a typed dictionary

# A resolved configuration, as `Spec.model_dump(mode="json")` returns it.
SpecDocument = Annotated[dict[str, Any], GetPydanticSchema(lambda _, handler: handler(Spec))]


class Gpu(TypedDict):
    """The GPU that the verdict refers to."""

    name: str
    advertised_bytes: int
    usable_bytes: int


class OutsideAllocated(TypedDict):
    """Device memory outside the blocks that PyTorch has allocated."""

    cached_segments: int
    device_context: int
    communication_library: int


class IntervalBytes(TypedDict):
    """The expected range of device memory, from the errors of recorded runs of one kind."""

    low_bytes: int
    high_bytes: int
    runs: int
    """recorded runs; 0: none of this kind, so an error of 10 % on both sides is assumed"""
    kind: str
    replayed: bool
    """whether the allocator was replayed: the central 95 % of errors, else all"""
    median_error: float
    """absolute, as a fraction of reserved memory"""
    worst_error: float


class LimitRow(TypedDict):
    """Memory or a feature that the figures omit."""

    what: str
    holds_memory: bool
    """the run uses it and it needs GPU memory, so the figures are lower bounds"""
    at_least_bytes: int
    overcounts: Overcount
    """what the figures count and the run may not need: activations (and all else that a step frees again), states (also
    gradients, master weights and optimizer state), precision (also the bits per weight beyond 4), or all"""


def filled(kind: type[Keys], source: object, **rest: object) -> Keys:
    """Return a part of a document: each key is the source's field of that name, unless `rest` has it.

    Args:
        kind: the typed dictionary.
        source: the object with the fields; its tuples become lists.
        rest: the keys that it has under other names, or otherwise.
    """
    own = ((name, getattr(source, name)) for name in kind.__annotations__ if name not in rest)
    copied = {name: list(value) if isinstance(value, tuple) else value for name, value in own}
    return cast("Keys", {name: (copied | rest)[name] for name in kind.__annotations__})


def interval(verdict: Verdict | None) -> IntervalBytes | None:
    """Return the interval of a verdict; None if it has none."""
    if verdict is None or verdict.interval is None:
        return None
    found, errors = verdict.interval, verdict.interval.errors
    return {
        "low_bytes": found.low_bytes,
        "high_bytes": found.high_bytes,
        "runs": errors.runs,
        "kind": errors.run_type,
        "replayed": errors.replayed,
        "median_error": errors.median,
        "worst_error": errors.worst,
    }


def limit_row(limit: Limit) -> LimitRow:
    """Return a feature that is not modelled."""
    return filled(LimitRow, limit, what=limit.feature)


def by_name(components: Mapping[Component, int]) -> dict[str, int]:
    """Return bytes by the name of their component."""
    return {component.value: size for component, size in components.items()}
