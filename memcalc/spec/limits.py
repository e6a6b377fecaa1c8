"""Limits: requested features that the estimate does not model, and whether they need GPU memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Overcount = Literal["nothing", "activations", "states", "precision", "all"]
OVERCOUNTS: tuple[Overcount, ...] = ("nothing", "activations", "states", "precision", "all")  # each includes the former


class Limit(NamedTuple):
    """A feature that the estimate of a run omits.

    `memcalc.estimation.limits.limits_of` computes at_least_bytes and holds_memory from the other numbers: the
    reader of a file does not know the model's size, and a search changes the micro-batch.
    """

    feature: str  # a short noun phrase, which can follow "not modelled:" in a headline
    # whether the run requests it and it needs GPU memory that the estimate omits, so that the estimate is a lower
    # bound. False if the estimate is exact or too high nevertheless, and for features that no configuration states
    # (loading, initialization, logging).
    holds_memory: bool
    at_least_bytes: int = 0  # a proven lower bound of its contribution to the peak of each GPU; 0 if none is known
    bytes_per_parameter: int = 0  # bytes per parameter of a frozen copy of the run's own model on the GPUs; 0: no copy
    # sequences of a forward pass without gradients; 0: none. The pass needs more memory than the training step only if
    # they exceed the micro-batch.
    sequences: int = 0
    parameters_of_whole: int = 0  # elements of the whole model that this run's model is a part of; 0: unknown
    # bytes per parameter of further optimizer state that each GPU has for the whole model; 0: none is known
    state_bytes_per_parameter: int = 0
    # what the estimate counts although the run may not need it, so that the estimate is perhaps too high: activations
    # (and all else that a step frees again), states (also gradients, master weights and optimizer state), precision
    # (also the bits per weight beyond 4), or all
    overcounts: Overcount = "nothing"
    at_most_bytes: int | None = None  # an upper bound of its contribution; None if none is known


def most_overcounted(limits: Iterable[Limit]) -> Overcount:
    """Return what the estimate of a run counts too high because of any of its limits."""
    return max((limit.overcounts for limit in limits), key=OVERCOUNTS.index, default="nothing")


def most_unmodelled_bytes(limits: Iterable[Limit]) -> int | None:
    """Return the most that limits which hold memory add to the estimate; None if one of them has no upper bound."""
    bounds = [limit.at_most_bytes for limit in limits if limit.holds_memory]
    known = [bound for bound in bounds if bound is not None]
    return sum(known) if len(known) == len(bounds) else None
