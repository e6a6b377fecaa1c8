"""What can be asked of a null device, besides the card."""

from __future__ import annotations

from typing import TypedDict

BALANCED, WORST_CASE = "balanced", "worst-case"  # how experts and tokens are chosen by scores that nobody knows


class Options(TypedDict, total=False):
    """Settings of `environment`, `run` and what builds on them.

    Args:
        steps: end each process after so many optimizer steps.
        skip_init: do not initialise weights, so that the host's memory stays untouched.
        random_weights: transformers' from_pretrained makes weights from the config alone; no checkpoint is read.
        delayed_events: work on a stream is complete only when the host waits for it, not at once: the other bound
            of how early memory that two streams share can be used again.
        world_size: the command is one rank of so many, of which no other is started.
        rank: which one; 0 if nothing is said.
        routing: what scores that kernels should have computed choose: "balanced", each expert as often as any other;
            or "worst-case", the same experts for every token.
        history: find the lines of the program whose tensors were alive at the peak.
    """

    steps: int | None
    skip_init: bool
    random_weights: bool
    delayed_events: bool
    world_size: int | None
    rank: int
    routing: str
    history: bool
