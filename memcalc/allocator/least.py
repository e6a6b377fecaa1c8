"""The least memory in which a run ends: less than it reserves on a roomy card, where nothing need be given back."""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.allocator.playing import replay
from memcalc.allocator.pytorch.settings import Settings
from memcalc.allocator.pytorch.versions import Version
from memcalc.events.event import Event

STEP = 2 * 2**20  # bytes of PyTorch's smallest segment, kSmallBuffer of CUDACachingAllocator.cpp


def least_memory(events: Sequence[Event], config: Settings | str = "", version: Version | str | None = None) -> int:
    """The smallest capacity on which PyTorch's allocator carries a stream of events to its end, in bytes.

    Found by halving, to `STEP` bytes: every capacity that was tried from the answer on fits, and `STEP` bytes less does
    not. A stream can be made that fits at some capacity below and not at one between; the answer is then no less safe.

    Args:
        events: in order.
        config: the settings as PYTORCH_CUDA_ALLOC_CONF, or as parsed.
        version: the release whose rules hold; None for the newest one known.

    Raises:
        InputError: for settings that PyTorch refuses, or events that cannot follow each other.
    """
    roomy = replay(events, config, version)
    most = -(-roomy.peak_reserved // STEP)  # in steps: fits, as nothing was ever asked for beyond
    least = roomy.peak_allocated // STEP - 1  # does not
    while most - least > 1:
        middle = (most + least) // 2
        if replay(events, config, version, middle * STEP).failure is None:
            most = middle
        else:
            least = middle
    return most * STEP
