"""Many files on several cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from memcalc.progress import Progress, silent

T = TypeVar("T")
U = TypeVar("U")

WORTH_IT = 64  # files: below that, starting processes takes longer than they save
_SHARES = 4  # of each process: the last ones end at about the same time


def cores() -> int:
    """How many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS and Windows
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def mapped(
    function: Callable[[T], U],
    items: Sequence[T],
    jobs: int | None,
    what: str = "items",
    progress: Progress = silent,
) -> list[U]:
    """Return `function(item)` for each item, in order.

    Args:
        function: can be sent to another process, as can its results.
        items: likewise.
        jobs: processes; None: one a core where there is enough to do.
        what: the items are called.
        progress: told how many are done.
    """
    if jobs is None:
        jobs = cores() if len(items) >= WORTH_IT else 1
    jobs = min(jobs, len(items))
    if jobs <= 1:
        return list(_told(map(function, items), what, progress, len(items)))
    from concurrent.futures import ProcessPoolExecutor  # a check of one file starts sooner without

    with ProcessPoolExecutor(jobs, initializer=_begin) as pool:
        try:
            found = pool.map(function, items, chunksize=max(1, len(items) // (jobs * _SHARES)))
            return list(_told(found, what, progress, len(items)))
        except BaseException:  # interrupted: what is still to be done is not waited for
            processes = list((pool._processes or {}).values())  # noqa: SLF001 -- public from Python 3.14 on
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            raise


def _told(items: Iterator[T], what: str, progress: Progress, total: int) -> Iterator[T]:
    for number, item in enumerate(items, start=1):
        progress(what, number, total)
        yield item


def _begin() -> None:
    """Initialize a process of the pool: ignore signals, and end when its parent ends."""
    import signal
    import threading

    # Ctrl-C goes to all processes of a terminal; one of them is enough to end them all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End the process when its parent ends, even if killed."""
    import multiprocessing
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    if parent is not None:
        wait((parent.sentinel,))
        os._exit(1)
