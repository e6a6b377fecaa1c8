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
from memcalc.engine.order import Order
from memcalc.engine.points import Context, Points, Source
from memcalc.engine.pruned import Pruned
from memcalc.engine.results import AT_PEAK, BY_PHASE, PHASE, STAGE, WIDTH
from memcalc.engine.table import COMPONENTS, Table
from memcalc.engine.terms import DOES_NOT_FIT, UNJUDGED, judged
from memcalc.estimation.items import PHASES

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
    with _uncollected():
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
            if not gc.get_freeze_count():
                gc.freeze()  # what is new counts as old, so that it is not walked through at once: there are no cycles
                gc.unfreeze()
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
    count = prod(shape)
    valid = np.zeros(count, dtype=np.bool_)
    columns = np.zeros((len(OUTSIDE) + WIDTH, count), dtype=np.int64)
    numbers = np.zeros(count, dtype=np.int32)  # of terms
    table = np.zeros((len(PHASES), len(COMPONENTS), count), dtype=np.int64) if ledger else None
    axes = points.grid.axes
    batch = {
        field: tuple(int(str(axes[number].values[step][0])) for step in ranges[number])
        for number, field in points.inner.items()
    }
    order = Order(shape, points.inner)
    own = [
        [dict(zip(axes[number].fields, axes[number].values[step], strict=True)) for step in ranges[number]]
        for number in order.outer
    ]
    can, outside = order.by_context(valid), order.by_context(columns[: len(OUTSIDE)])
    rows, terms = order.by_context(columns[len(OUTSIDE) :]), order.by_context(numbers)
    ledgers = None if table is None else order.by_context(table)
    places: dict[int, tuple[int, ...]] = {}  # of contexts, by their ids: their steps on the outer axes

    def contexts() -> Iterator[Context]:
        for steps in np.ndindex(*(shape[number] for number in order.outer)):
            values: dict[str, Any] = {}
            for several, step in zip(own, steps, strict=True):
                values |= several[step]
            context = points.context(values, batch)
            if context is not None:
                outside[(slice(None), *steps)] = context.outside
                terms[steps] = context.terms
                places[id(context)] = steps
                yield context

    for found in sizer.found(contexts()):
        place = (*places[id(found.context)], *found.where)
        can[place] = found.context.valid[found.where]
        rows[(slice(None), *place)] = found.rows
        if ledgers is not None:
            ledgers[(slice(None), slice(None), *place)] = found.ledger
    order.to_grid((valid, numbers, *columns, *(() if table is None else table.reshape(-1, count))))
    peak = columns[len(OUTSIDE) :][BY_PHASE].max(axis=0)
    too_large = valid & (peak > LARGEST)
    valid &= ~too_large
    missing, large = ~valid, too_large & (columns[OUTSIDE.index("usable_bytes")] >= 0)
    if missing.any():
        columns[:, missing] = peak[missing] = 0
        if table is not None:
            table[:, :, missing] = 0
    (beyond, usable), rows = np.split(columns, [len(OUTSIDE)])
    phase, stage, phases, components = rows[PHASE], rows[STAGE], rows[BY_PHASE], rows[AT_PEAK]
    reserved, verdict = judged(peak, beyond, usable, numbers, points.terms.terms)
    verdict[missing] = UNJUDGED
    verdict[large] = DOES_NOT_FIT
    return Table(
        points.grid,
        start,
        valid,
        too_large,
        peak,
        phase,
        stage,
        reserved,
        reserved + beyond,
        usable,
        verdict,
        np.zeros(count, dtype=np.bool_),
        phases.T,
        components.T,
        None if table is None else table.transpose(2, 0, 1),
        Pruned(points),
        numbers,
        points.terms.terms,
    )
