"""Many files on several cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")

WORTH_IT = 64  # files: below that, starting processes takes longer than they save
_SHARES = 4  # of each process: the last ones end at about the same time


def cores() -> int:
    """How many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS and Windows
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def mapped(function: Callable[[T], U], items: Sequence[T], jobs: int | None) -> list[U]:
    """`function` of each item, in order.

    Args:
        function: can be sent to another process, as can its results.
        items: likewise.
        jobs: processes; None: one a core where there is enough to do.
    """
    if jobs is None:
        jobs = cores() if len(items) >= WORTH_IT else 1
    jobs = min(jobs, len(items))
    if jobs <= 1:
        return [function(item) for item in items]
    import signal
    from concurrent.futures import ProcessPoolExecutor  # a check of one file starts sooner without

    # Ctrl-C goes to all processes of a terminal; one of them is enough to end them all.
    with ProcessPoolExecutor(jobs, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        return list(pool.map(function, items, chunksize=max(1, len(items) // (jobs * _SHARES))))
