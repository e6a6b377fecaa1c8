"""Work on many files in several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from memcalc.progress import Progress, silent

T = TypeVar("T")
U = TypeVar("U")

WORTH_IT = 64  # files; with fewer, starting processes costs more time than it saves
_SHARES = 32  # chunks per process: files differ in cost, and all processes shall end at about the same time


def cores() -> int:
    """Return the number of processor cores that this process may use."""
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
        function: must be picklable, as must its results.
        items: must be picklable.
        jobs: number of processes; None: one per core if there are enough items.
        what: what the items are, for progress.
        progress: called with the number of finished items.
    """
    if jobs is None:
        jobs = cores() if len(items) >= WORTH_IT else 1
    jobs = min(jobs, len(items))
    if jobs <= 1:
        return list(_told(map(function, items), what, progress, len(items)))
    from concurrent.futures import ProcessPoolExecutor  # imported late: a check of one file starts faster

    with ProcessPoolExecutor(jobs, initializer=_begin) as pool:
        try:
            found = pool.map(function, items, chunksize=max(1, len(items) // (jobs * _SHARES)))
            return list(_told(found, what, progress, len(items)))
        except BaseException:  # interrupted: do not wait for the remaining items
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
    """Initialize a process of the pool: ignore Ctrl-C, and end when the parent ends."""
    import signal
    import threading

    # Ctrl-C is sent to all processes of a terminal; the parent ends the others.
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
