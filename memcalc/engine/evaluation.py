"""Grid in, Table out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from memcalc.engine.grid import Grid, Value, assignments
from memcalc.engine.table import COMPONENTS, Table
from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.estimation.items import PHASES
from memcalc.importers.loading import import_file, load
from memcalc.ledger.result import Result
from memcalc.spec.overrides import parse_overrides
from memcalc.spec.reading import read_source
from memcalc.spec.spec import Spec

Source = Spec | str | Path | Mapping[str, Any]
Axes = Mapping[Any, Iterable[Value]]  # Any: mappings of names and of tuples of names alike

COLUMNS = ("peak", "phase", "stage", "reserved", "device", "usable")

BLOCK = 65_536  # configurations that are in memory at a time


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
    tables = blocks(
        source, grid, *overrides, gpu=gpu, gpus_per_node=gpus_per_node, ledger=ledger, size=max(grid.size, 1)
    )
    return next(tables)


def blocks(
    source: Source,
    axes: Axes | Grid,
    *overrides: str,
    gpu: str | None = None,
    gpus_per_node: int | None = None,
    ledger: bool = False,
    size: int = BLOCK,
) -> Iterator[Table]:
    """The same in blocks of `size` configurations, one after the other, so that memory stays bounded."""
    grid = axes if isinstance(axes, Grid) else Grid(axes)
    points = _Points(source, grid, overrides, gpu, gpus_per_node)
    for start in range(0, grid.size, size):
        yield _sized(points, start, min(start + size, grid.size), ledger=ledger)


class _Points:
    """The configurations of a grid, loaded one by one."""

    def __init__(
        self, source: Source, grid: Grid, overrides: tuple[str, ...], gpu: str | None, gpus_per_node: int | None
    ) -> None:
        if isinstance(source, str | Path):
            parse_overrides(overrides)
            if import_file(source, overrides) is None:
                read_source(source)  # what cannot be read is no matter of single configurations
        self.source, self.grid, self.overrides = source, grid, overrides
        self.gpu, self.gpus_per_node = gpu, gpus_per_node

    def spec(self, number: int) -> Spec:
        spec = load(self.source, (*self.overrides, *assignments(self.grid.point(number))), gpu=self.gpu)
        ranks = spec.parallelism.tensor_parallel
        if self.gpus_per_node is not None and ranks > self.gpus_per_node:
            raise InputError(
                f"tensor_parallel = {ranks} is more than the {self.gpus_per_node} GPUs of a node.",
                "Its ranks exchange activations in every layer: keep them inside one node.",
                "parallelism.tensor_parallel",
            )
        return spec

    def reason(self, number: int) -> str:
        try:
            self.spec(number)
        except InputError as error:
            return str(error)
        return ""


def _sized(points: _Points, start: int, stop: int, *, ledger: bool) -> Table:
    count = stop - start
    valid = np.zeros(count, dtype=np.bool_)
    numbers = {name: np.zeros(count, dtype=np.int64) for name in COLUMNS}
    phases = np.zeros((count, len(PHASES)), dtype=np.int64)
    components = np.zeros((count, len(COMPONENTS)), dtype=np.int64)
    rows = np.zeros((count, len(PHASES), len(COMPONENTS)), dtype=np.int64) if ledger else None
    for index in range(count):
        try:
            result = estimate(points.spec(start + index))
        except InputError:
            continue
        valid[index] = True
        values = _numbers(result)
        for name, column in numbers.items():
            column[index] = values[name]
        phases[index] = [result.ledger.totals[phase] for phase in PHASES]
        at_peak = result.ledger.components(result.ledger.peak_phase)
        components[index] = [at_peak.get(component, 0) for component in COMPONENTS]
        if rows is not None:
            table = result.ledger.components_by_phase
            rows[index] = [[table[phase].get(component, 0) for component in COMPONENTS] for phase in PHASES]
    return Table(
        points.grid,
        start,
        valid,
        numbers["peak"],
        numbers["phase"],
        numbers["stage"],
        numbers["reserved"],
        numbers["device"],
        numbers["usable"],
        phases,
        components,
        rows,
        points.spec,
        points.reason,
    )


def _numbers(result: Result) -> dict[str, int]:
    rank = result.headline
    outside = rank.outside
    peak = result.ledger.peak_bytes
    return {
        "peak": peak,
        "phase": PHASES.index(result.ledger.peak_phase),
        "stage": rank.rank["pipeline_stage"],
        "reserved": rank.reserved_bytes or 0,
        "device": peak + outside.cached_segments + outside.device_context + outside.communication_library,
        "usable": -1 if result.card is None else result.card.usable_bytes,
    }
