"""Search, sweep and check many runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from memcalc.api.sources import Source, assignments, load_to_run, run_of
from memcalc.progress import Progress, silent

if TYPE_CHECKING:
    from memcalc.cells.cell import GridCells
    from memcalc.cells.cell_sweep import Told
    from memcalc.checking.report import CheckReport, Describe
    from memcalc.nullcuda.options import Options
    from memcalc.search.result import FitResult
    from memcalc.spec.spec import Spec
    from memcalc.sweeping import Grid, Table

_T = TypeVar("_T")


def _no_progress(*_: object) -> None:
    pass


def sweep(
    source: Source,
    axes: Mapping[Any, Iterable[object]] | Grid,
    *overrides: str,
    gpu: str | None = None,
    gpus_per_node: int | None = None,
    replay: int = 0,
    progress: Progress = silent,
) -> Table:
    """Estimate every configuration of a grid, as `estimate` does; returns arrays with one entry each. Loads NumPy.

    With a GPU, bounds decide which configurations fit; undecided ones are "close". The Pareto front is replayed
    through a model of PyTorch's allocator, with at most 32 replays.

    Args:
        source: as for `load`.
        axes: the values of each field: {"b": range(1, 65), "recompute": ["none", "full"]}. A tuple of names with tuples
            of values is one axis: fields that change together.
        overrides: as for `load`, applied to all.
        gpu: as for `load`.
        gpus_per_node: exclude layouts with tensor parallelism over more GPUs than a node has.
        replay: number of further configurations to replay: the closest to the usable memory of their GPU.
        progress: called with the number of finished runs that differ in more than their batches, and the number of
            replays.
    """
    from memcalc.sweeping import evaluate
    from memcalc.sweeping.replays import replay as replayed

    table = evaluate(source, axes, *overrides, gpu=gpu, gpus_per_node=gpus_per_node, progress=progress)
    return replayed(table, replay, progress)


def sweep_runs(  # noqa: PLR0913 -- what the command has options for
    source: Source,
    axes: Mapping[Any, Iterable[object]] | Grid,
    *overrides: str,
    cells: str | Path,
    by: str = "trace",
    gpu: str | None = None,
    steps: int = 3,
    python: str | None = None,
    workers: int | None = None,
    scheduler: str | None = None,
    tell: Told = _no_progress,
) -> GridCells:
    """Trace every configuration of a grid, each in a separate process. Loads NumPy; its processes load torch.

    Args:
        source: as for `load`.
        axes: as for `sweep`.
        overrides: as for `load`, applied to all.
        cells: the file that keeps the result of each run. Runs with a result in the file are not repeated.
        by: "trace": on fake tensors; "null": on the null device.
        gpu: as for `load`.
        steps: optimizer steps of each run.
        python: as for `trace`.
        workers: processes at a time; None: one per core.
        scheduler: address of an existing Dask cluster, on which workers run the processes; None: this machine.
        tell: called for each finished cell, with the numbers of finished cells and of all cells.
    """
    from memcalc.api.sources import load
    from memcalc.cells.cell_sweep import run_cells
    from memcalc.cells.requests import traced_cells
    from memcalc.sweeping.grid import Grid

    grid = axes if isinstance(axes, Grid) else Grid(axes)

    def loaded(values: tuple[str, ...]) -> Spec:
        return load_to_run(source, *overrides, *values, gpu=gpu)

    found = traced_cells(by, grid, loaded, steps, python)
    name = load(source, *overrides, gpu=gpu).name
    return run_cells(name, found, Path(cells), workers=workers, scheduler=scheduler, tell=tell)


def sweep_command(
    command: Sequence[str],
    axes: Mapping[str, Sequence[object]],
    *,
    cells: str | Path,
    gpu: str | None = None,
    gpus: int = 1,
    timeout: float | None = None,
    workers: int | None = None,
    scheduler: str | None = None,
    tell: Told = _no_progress,
    **options: Unpack[Options],
) -> GridCells:
    """Dry-run a command for every combination of values; a value replaces its {name} in the command.

    Args:
        command: the program and its arguments.
        axes: the values of each name; the values of "gpu" are the simulated GPUs.
        cells: as for `sweep_runs`.
        gpu: as for `dry_run`.
        gpus: as for `dry_run`.
        timeout: seconds for each run.
        workers: as for `sweep_runs`.
        scheduler: as for `sweep_runs`.
        tell: as for `sweep_runs`.
        options: see `memcalc.nullcuda.options.Options`.
    """
    import shlex

    from memcalc.cells.cell_sweep import run_cells
    from memcalc.cells.requests import command_cells
    from memcalc.text import masked

    found = command_cells(command, axes, gpu, gpus=gpus, timeout=timeout, options=options)
    return run_cells(shlex.join(masked(command)), found, Path(cells), workers=workers, scheduler=scheduler, tell=tell)


def fit(  # noqa: PLR0913 -- what the command has options for
    source: Source,
    *overrides: str,
    gpu: str | None = None,
    gpus: int | None = None,
    maximize: str | None = None,
    minimize: str | None = None,
    hold: Sequence[str] = (),
    progress: Progress = silent,
    node: int | None = None,
    nic_gbit: float | None = None,
    top: int = 5,
    prices: Mapping[str, float] = MappingProxyType({}),
    **fields: Any,
) -> FitResult:
    """Search what fits: the largest batch and sequence, the fewest GPUs, the best layouts, the smallest changes.

    Args:
        source: as for `load`.
        overrides: as for `load`.
        gpu: as for `load`; a GPU must be named here or in the configuration.
        gpus: number of GPUs; None: as in the configuration. With minimize="gpus" or "cost": the most to
            try.
        maximize: search only this quantity: micro_batch_size, sequence_length, layers or parameters.
        minimize: search only this quantity: gpus, gpu_kind, recompute or cost.
        hold: fields of the parallelism, `micro_batch_size` or `recompute`, to keep as configured in every layout.
        progress: called with the number of finished layouts and changes.
        node: GPUs per node; None: as in the vendor's server.
        nic_gbit: network rate per GPU in Gbit/s; None: as in the vendor's server.
        top: number of layouts to return in full.
        prices: with minimize="cost", of one GPU for one hour, by its name, in any currency: {"h100-80gb": 2.10}.
        fields: as for `load`.
    """
    from memcalc.search.fit import fit as fit_run
    from memcalc.search.result import Cluster, FitQuery

    gpu, most = _described_on(gpu, minimize, prices), gpus
    if minimize in ("gpus", "cost"):
        gpus = 1  # of the run's description
    cluster = Cluster(node=node, nic_gbit=nic_gbit, top=top)
    question = FitQuery(
        gpus=most, maximize=maximize, minimize=minimize, fixed_fields=tuple(hold), prices=prices, **cluster
    )
    run = run_of(source, *overrides, *assignments(fields), gpu=gpu, gpus=gpus, verb="fit")
    return fit_run(run, question, progress)


def _described_on(gpu: str | None, minimize: str | None, prices: Mapping[str, float]) -> str | None:
    """Return the GPU that the run is loaded with: the first with a price, if the search is for the least cost.

    Raises:
        InputError: the prices are wrong, missing or not used, or a GPU is named in addition.
    """
    if not prices and minimize != "cost":
        return gpu
    from memcalc.errors import InputError
    from memcalc.search.offers import FORM, checked_prices

    if not prices or minimize != "cost":
        raise InputError(
            "--minimize cost and --price need each other.", f"Write --minimize cost --price {FORM}.", "fit"
        )
    checked_prices(prices)
    if gpu is not None:
        raise InputError("--gpu and --price both name GPUs.", "Leave --gpu out.", "--price")
    return next(iter(prices))


def _read(option: str, text: str, parse: Callable[[str], _T]) -> _T:
    """Return the parsed value; an error names the option that it was given for."""
    from memcalc.errors import InputError

    try:
        return parse(text)
    except InputError as error:
        raise error.located(option) from None


def check(  # noqa: PLR0913 -- what the command has options for
    *paths: str | Path,
    overrides: Iterable[str] = (),
    gpu: str | None = None,
    budget: int | str | None = None,
    margin: str | None = None,
    baseline: str | Path | None = None,
    max_growth: str | None = None,
    jobs: int | None = None,
    settings: str | Path | None = None,
    skip_others: bool = False,
    describe: Describe | None = None,
    progress: Progress = silent,
) -> CheckReport:
    """Check whether every configuration under `paths` fits.

    Args:
        paths: files, directories and patterns; none: `paths` of the settings.
        overrides: as for `load`, for all of them.
        gpu: the GPU to check all against; default: the GPU of the settings, else of each file.
        budget: memory limit per GPU in bytes, or "70GiB".
        margin: memory to keep free below GPU and budget: "5%", "2GiB".
        baseline: the JSON of an earlier check, to compare with.
        max_growth: largest growth of a peak over the baseline that passes: "1%", "0"; default: no limit.
        jobs: processes; default: one per core, if there are enough configurations.
        settings: a settings file; default: memcalc.toml or [tool.memcalc] in this directory or above.
        skip_others: skip named files that are not configurations.
        describe: makes the `description` of each outcome from its complete estimate, as plain data for a report, for at
            most 100 configurations: those that do not fit, then the closest to their limit. Picklable.
        progress: called with the number of finished files.
    """
    from memcalc.checking.amount import parse_amount, parse_budget
    from memcalc.checking.check import check as check_paths
    from memcalc.checking.policy import Limits
    from memcalc.checking.settings_lookup import policy_for

    asked = Limits(
        gpu,
        _read("--budget", budget, parse_budget) if isinstance(budget, str) else budget,
        None if margin is None else _read("--margin", margin, parse_amount),
        None if max_growth is None else _read("--max-growth", max_growth, parse_amount),
        tuple(overrides),
    )
    policy = policy_for(settings)
    return check_paths(
        paths,
        asked,
        policy,
        baseline=baseline,
        jobs=jobs,
        skip_others=skip_others,
        describe=describe,
        progress=progress,
    )
