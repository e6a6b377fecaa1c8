"""Options of a null device, except for the GPU."""

from __future__ import annotations

from typing import TypedDict

BALANCED = "balanced"  # the default of `Options.routing`


class Options(TypedDict, total=False):
    """Options of `environment`, `run` and functions based on them.

    Args:
        steps: end each process after this number of optimizer steps.
        skip_init: do not initialize weights, so that they use no host memory.
        random_weights: transformers' from_pretrained makes weights from the config alone; no checkpoint is read.
        delayed_events: work on a stream is complete only when the host waits for it, instead of immediately. This is
            the other bound of how early memory shared by two streams can be reused.
        world_size: number of ranks of the job; the command is one of them, and no other rank is started.
        rank: index of that rank; default 0.
        routing: what unknown scores choose: "balanced", each expert equally often; or "worst-case", the same experts
            for every token.
        history: find the lines of the program that allocated the live tensors of the peak.
    """

    steps: int | None
    skip_init: bool
    random_weights: bool
    delayed_events: bool
    world_size: int | None
    rank: int
    routing: str
    history: bool
