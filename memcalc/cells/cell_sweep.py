"""Runs of the cells of a grid that have no answer yet; each answer is stored as it arrives."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from memcalc.cells.cell import By, CellResult, GridCell, GridCells, Request
from memcalc.cells.result_file import ResultFile
from memcalc.errors import NotWritten

Told = Callable[[GridCell | None, int, int], None]  # a finished cell, the number of finished cells, the number of cells


def run_cells(
    name: str,
    cells: Sequence[GridCell],
    file: Path,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    tell: Told = lambda *_: None,
) -> GridCells:
    """Run the cells that the file has no answer for.

    Args:
        name: name of the swept run.
        cells: cells of the grid; those with an answer are not run.
        file: file of answers, of earlier sweeps and of this one.
        workers: number of processes at a time; None: one per processor core that this process may use.
        scheduler: address of a Dask cluster; None: run the cells locally.
        tell: called first with None and the number of cells that need no run, then for each finished cell.

    Raises:
        InputError: the file has other content, or cannot be written.
        Unavailable: a requirement of every cell is missing.
    """
    kept = ResultFile(file)
    found = [cell if cell.answer is not None else replace(cell, answer=kept.find(cell)) for cell in cells]
    used = sum(cell.answer is not None and not before.answer for cell, before in zip(found, cells, strict=True))
    waiting = [number for number, cell in enumerate(found) if cell.answer is None]
    done = len(found) - len(waiting)
    unkept: NotWritten | None = None
    tell(None, done, len(found))
    with closing(_run([found[number].request for number in waiting], workers, scheduler)) as answers:
        for number, answer in answers:
            found[waiting[number]] = cell = replace(found[waiting[number]], answer=answer)
            try:
                kept.add(cell, answer)
            except NotWritten as error:
                unkept = error
                break
            done += 1
            tell(cell, done, len(found))
    fields = tuple(found[0].values) if found else ()
    by: By = found[0].request["by"] if found else "trace"
    answered = tuple(cell for cell in found if cell.answer is not None)
    return GridCells(name, by, fields, answered, used, unkept)


def _run(
    requests: Sequence[Request], workers: int | None, scheduler: str | None
) -> Generator[tuple[int, CellResult], None, None]:
    if not requests:
        return
    if scheduler is not None:
        from memcalc.cells.cluster import run_on_cluster

        yield from run_on_cluster(requests, scheduler)
    else:
        from memcalc.cells.local_processes import run_here

        yield from run_here(requests, workers or cores())


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
