"""Options of a null device, except for the GPU."""

from __future__ import annotations

from typing import TypedDict

BALANCED = "balanced"  # the default of `Options.routing`


class Options(TypedDict, total=False):
    """Options of `environment`, `run` and functions based on them."""

    steps: int | None  # end each process after this number of optimizer steps
    skip_init: bool  # do not initialize weights, so that they use no host memory
    random_weights: bool  # transformers' from_pretrained makes weights from the config alone; no checkpoint is read
    # work on a stream is complete only when the host waits for it, instead of immediately. This is the other bound of
    # how early memory shared by two streams can be reused.
    delayed_events: bool
    world_size: int | None  # number of ranks of the job; the command is one of them, and no other rank is started
    rank: int  # index of that rank; default 0
    # what unknown scores choose: "balanced", each expert equally often; or "worst-case", the same experts for every
    # token
    routing: str
    history: bool  # find the lines of the program that allocated the live tensors of the peak
