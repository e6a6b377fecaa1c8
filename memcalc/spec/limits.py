"""What a run asks for and the estimate does not model: each with whether it holds GPU memory that is not counted."""

from __future__ import annotations

from typing import NamedTuple


class Limit(NamedTuple):
    """Something that the estimate of a run leaves out.

    Args:
        what: a short noun phrase, which can follow "not modelled:" in a headline.
        holds_memory: whether the run asks for it and it holds GPU memory that the estimate does not count, so that the
            estimate is a lower bound. False where the estimate is exact or too high all the same, and for what no
            configuration states (loading, initialization, logging).
        at_least_bytes: a proven lower bound of what it adds to the peak of each GPU; 0 where none is known.
        bytes_per_parameter: of a frozen copy of the run's own model that it keeps on the GPUs; 0: it keeps none.
        sequences: of one forward pass without gradients that it runs; 0: it runs none. It holds memory beyond the
            training step only where they are more than a micro-batch.

    The last two are for `memcalc.estimation.limits.limits_of`, which computes at_least_bytes and holds_memory from
    them: whoever reads a file does not know the model's size, and a search changes the micro-batch.
    """

    what: str
    holds_memory: bool
    at_least_bytes: int = 0
    bytes_per_parameter: int = 0
    sequences: int = 0
    parameters_of_whole: int = 0
