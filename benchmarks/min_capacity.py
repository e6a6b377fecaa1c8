"""The minimum capacity on which a run completes: less than it reserves on a GPU large enough to keep all its cache."""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.allocator.event_replay import replay
from memcalc.allocator.pytorch.settings import Settings
from memcalc.allocator.pytorch.versions import Version
from memcalc.events.event import Event

STEP = 2 * 2**20  # bytes of PyTorch's smallest segment, kSmallBuffer of CUDACachingAllocator.cpp


def least_memory(events: Sequence[Event], config: Settings | str = "", version: Version | str | None = None) -> int:
    """Return the smallest capacity, in bytes, on which the PyTorch allocator completes an event stream.

    Found by bisection, to `STEP` bytes: the result and every larger capacity tried fit, and `STEP` bytes less does not.
    A stream may fit at a smaller capacity and fail at one in between; the result is safe in that case, too.

    Args:
        events: in order.
        config: the settings as PYTORCH_CUDA_ALLOC_CONF, or parsed.
        version: the PyTorch version; None for the newest one known.

    Raises:
        InputError: for settings that PyTorch rejects, or events that cannot follow each other.
    """
    roomy = replay(events, config, version)
    most = -(-roomy.peak_reserved // STEP)  # in steps: fits, because a replay without a limit never reserved more
    least = roomy.peak_allocated // STEP - 1  # in steps: does not fit
    while most - least > 1:
        middle = (most + least) // 2
        if replay(events, config, version, middle * STEP).failure is None:
            most = middle
        else:
            least = middle
    return most * STEP
