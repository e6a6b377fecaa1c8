"""Grid in, Table out."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

from memcalc.engine.atoms import LARGEST
from memcalc.engine.batches import Sizer
from memcalc.engine.grid import Grid, Value
from memcalc.engine.points import Context, Points, Source
from memcalc.engine.reading import BATCH
from memcalc.engine.results import AT_PEAK, BY_PHASE, PHASE, STAGE, WIDTH
from memcalc.engine.table import COMPONENTS, Table
from memcalc.estimation.items import PHASES
from memcalc.estimation.outside import reserved_bytes

Axes = Mapping[Any, Iterable[Value]]  # Any: mappings of names and of tuples of names alike

# The first columns of a block: bytes outside the allocator, and usable ones; then the rows of results.
OUTSIDE = ("outside_bytes", "usable_bytes")

BLOCK = 1_048_576  # configurations that are in memory at a time, a quarter of a kilobyte each


def evaluate(
    source: Source,
    axes: Axes | Grid,
    *overrides: str,
    gpu: str | None = None,
    gpus_per_node: int | None = None,
    ledger: bool = False,
) -> Table:
    """Every configuration of a grid, sized as `memcalc.estimate(source, *overrides, ..., gpu=gpu)` sizes it.

    A configuration that cannot be is pruned, not an error: `Table.valid` says which, `Table.reason` why.

    Args:
        source: as for `memcalc.load`.
        axes: the values of each field, or a Grid: see there.
        overrides: "field=value", applied to all of them.
        gpu: the card to judge by.
        gpus_per_node: prune what splits tensors over more ranks than a node has.
        ledger: also keep bytes by phase and component: a kilobyte a configuration.

    Raises:
        InputError: the source cannot be read, a field is unknown, or the card is.
    """
    grid = axes if isinstance(axes, Grid) else Grid(axes)
    (table,) = blocks(source, grid, *overrides, gpu=gpu, gpus_per_node=gpus_per_node, ledger=ledger, size=grid.size)
    return table


def blocks(
    source: Source,
    axes: Axes | Grid,
    *overrides: str,
    gpu: str | None = None,
    gpus_per_node: int | None = None,
    ledger: bool = False,
    size: int = BLOCK,
) -> Iterator[Table]:
    """The same in blocks of at most `size` configurations, one after the other, so that memory stays bounded."""
    grid = axes if isinstance(axes, Grid) else Grid(axes)
    points = Points(source, grid, overrides, gpu, gpus_per_node)
    sizer = Sizer(ledger=ledger)
    for start, ranges in _slabs(grid.shape, size):
        with _uncollected():
            table = _sized(points, sizer, start, ranges, ledger=ledger)
        yield table


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's collector of cycles, which would walk through all that is remembered again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _slabs(shape: tuple[int, ...], size: int) -> Iterator[tuple[int, tuple[range, ...]]]:
    """The grid in boxes of neighbours: the number of the first configuration, and the steps of each axis."""
    split = 0  # the axis that is cut; those before it take one value at a time, those behind it all
    while split < len(shape) and prod(shape[split + 1 :]) > size:
        split += 1
    split = min(split, max(len(shape) - 1, 0))
    behind = prod(shape[split + 1 :])
    step = max(size // behind, 1)
    start = 0
    for leading in np.ndindex(*shape[:split]):
        for first in range(0, shape[split] if shape else 1, step):
            cut = range(first, min(first + step, shape[split])) if shape else range(1)
            ranges = (*(range(n, n + 1) for n in leading), cut, *(range(n) for n in shape[split + 1 :]))
            yield start, ranges[: len(shape)]
            start += len(cut) * behind


def _sized(points: Points, sizer: Sizer, start: int, ranges: tuple[range, ...], *, ledger: bool) -> Table:
    shape = tuple(map(len, ranges))
    valid = np.zeros(shape, dtype=np.bool_)
    columns = np.zeros((len(OUTSIDE) + WIDTH, *shape), dtype=np.int64)
    table = np.zeros((len(PHASES), len(COMPONENTS), *shape), dtype=np.int64) if ledger else None
    axes = points.grid.axes
    batch = {
        field: tuple(int(str(axes[number].values[step][0])) for step in ranges[number])
        for number, field in points.inner.items()
    }
    outer = [number for number in range(len(axes)) if number not in points.inner]
    # The axes of batches in the order of BATCH, within those that are left once the outer ones have their values.
    inner = sorted(points.inner)
    order = [inner.index(number) for field in BATCH for number, own in points.inner.items() if own == field]
    absent = tuple(number for number, field in enumerate(BATCH) if field not in points.inner.values())
    places: dict[int, tuple[Any, ...]] = {}  # of contexts, by their ids: where their results go

    def contexts() -> Iterator[Context]:
        for steps in np.ndindex(*(shape[number] for number in outer)):
            values: dict[str, Any] = {}
            place: list[Any] = [slice(None)] * len(axes)
            for number, step in zip(outer, steps, strict=True):
                place[number] = step
                values |= zip(axes[number].fields, axes[number].values[ranges[number][step]], strict=True)
            context = points.context(values, batch)
            if context is not None:
                at = tuple(place)
                seen(columns[: len(OUTSIDE)], 1, at)[...] = context.outside
                ledgers = None if table is None else seen(table, 2, at)
                places[id(context)] = seen(valid, 0, at), seen(columns[len(OUTSIDE) :], 1, at), ledgers
                yield context

    def seen(array: np.ndarray[Any, Any], leading: int, at: tuple[Any, ...]) -> np.ndarray[Any, Any]:
        """The part of an array that is a context's, with all three axes of batches."""
        part = array[(*(slice(None),) * leading, *at, None)]  # None: a view, also where nothing is left to vary
        part = part.transpose(*range(leading), *(leading + number for number in (*order, len(order))))
        view: np.ndarray[Any, Any] = np.expand_dims(part, tuple(leading + number for number in absent))[..., 0]
        return view

    for found in sizer.found(contexts()):
        can, rows, ledgers = places[id(found.context)]
        can[found.where] = found.context.valid[found.where]
        rows[(slice(None), *found.where)] = found.rows
        if ledgers is not None:
            ledgers[(slice(None), slice(None), *found.where)] = found.ledger
    peak = columns[len(OUTSIDE) :][BY_PHASE].max(axis=0)
    too_large = valid & (peak > LARGEST)
    valid &= ~too_large
    missing = ~valid
    if missing.any():
        columns[:, missing] = peak[missing] = 0
        if table is not None:
            table[:, :, missing] = 0
    flat = columns.reshape(len(columns), -1)
    (outside, usable), rows = np.split(flat, [len(OUTSIDE)])
    phase, stage, phases, components = rows[PHASE], rows[STAGE], rows[BY_PHASE], rows[AT_PEAK]
    reserved: Any = reserved_bytes(peak.ravel())  # arrays count as numbers do
    return Table(
        points.grid,
        start,
        valid.ravel(),
        too_large.ravel(),
        peak.ravel(),
        phase,
        stage,
        reserved,
        reserved + outside,
        usable,
        phases.T,
        components.T,
        None if table is None else table.reshape(len(PHASES), len(COMPONENTS), -1).transpose(2, 0, 1),
        points.spec,
        points.reason,
        points.alike,
    )
