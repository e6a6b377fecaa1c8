"""The verbs of memcalc for programs; the command line says the same words and calls these.

Each takes a `source`: a path to a YAML file or a Hugging Face config.json, the name of a preset, a mapping of the same
shape as the YAML, or a Spec that was loaded before. Overrides are written as on the command line: "b=4",
"parallelism.zero_stage=3". Wrong input raises `InputError`; nothing is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from memcalc.progress import Progress, silent
from memcalc.spec.inference_rules import of_training
from memcalc.spec.spec import Spec

if TYPE_CHECKING:
    from typing import Unpack

    from memcalc.checking.comparison import Comparison
    from memcalc.checking.report import CheckReport
    from memcalc.diagnosis.diagnosis import Diagnosis
    from memcalc.engine import Grid, Table
    from memcalc.fitting.answer import Cluster, Fit
    from memcalc.ledger.result import Result
    from memcalc.measuring import Measurement
    from memcalc.nullcuda.options import Options
    from memcalc.nullcuda.result import DryRun
    from memcalc.planning.described import ChainPlanning
    from memcalc.planning.planning import Planning
    from memcalc.planning.verification import Verified
    from memcalc.proving.afterwards import Compared
    from memcalc.proving.beside import Beside
    from memcalc.proving.suite import Outcome
    from memcalc.recorder.judged import Judged
    from memcalc.recorder.trace import Trace
    from memcalc.replaying import Replay
    from memcalc.replaying.options import Question
    from memcalc.tracing.module import ModuleOptions, UserModule

_T = TypeVar("_T")
Source = Spec | str | Path | Mapping[str, Any]


def load(source: Source, *overrides: str, gpu: str | None = None) -> Spec:
    """The run that `source` describes, with every default filled in and every rule checked.

    Args:
        source: a path, a preset's name, "-" for standard input, a mapping, or a Spec.
        overrides: "field=value", applied in this order. On a Spec, whose derived sizes are already filled in, they
            change only the fields they name; on every other source sizes that follow from others follow.
        gpu: the card to judge by, in place of `hardware.gpu`.
    """
    from memcalc.importers.loading import load as load_spec

    return load_spec(source, overrides, gpu=gpu)


def estimate(
    source: Source, *overrides: str, gpu: str | None = None, rehearse: bool = False, alloc_conf: str = ""
) -> Result:
    """What each GPU will hold, from closed formulas: no torch, no GPU, a tenth of a second.

    Of a family that only transformers knows there are no formulas: its step is traced, and the result says so.

    Args:
        source: as for `load`.
        overrides: as for `load`.
        gpu: as for `load`.
        rehearse: whether to play every request of three steps to a model of PyTorch's allocator, for the rests of
            blocks and for reserved memory; where their order is not known, a note says why.
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF, for the rehearsal.
    """
    spec = load(source, *overrides, gpu=gpu)
    if spec.model.transformers_config is not None:
        from memcalc.tracing.trace import in_place_of_formulas

        return in_place_of_formulas(spec)
    if rehearse:
        from memcalc.rehearsal.rehearsal import estimate_rehearsed

        return estimate_rehearsed(spec, alloc_conf)
    if spec.inference is not None:
        from memcalc.estimation.generation.largest import estimate_with_largest

        return estimate_with_largest(spec)
    from memcalc.estimation.estimate import estimate as estimate_spec

    return estimate_spec(spec)


@overload
def trace(
    source: Source,
    *overrides: str,
    gpu: str | None = None,
    device: str = "fake",
    steps: int = 3,
    semantics: str = "cuda",
    alloc_conf: str = "",
    python: str | None = None,
    progress: Progress = silent,
) -> Trace: ...


@overload
def trace(
    source: UserModule,
    inputs: Any,
    /,
    *,
    gpu: str | None = None,
    steps: int = 3,
    semantics: str = "cuda",
    alloc_conf: str = "",
    progress: Progress = silent,
    **options: Unpack[ModuleOptions],
) -> Judged: ...


def trace(
    source: Source | UserModule,
    *given: Any,
    gpu: str | None = None,
    device: str = "fake",
    steps: int = 3,
    semantics: str = "cuda",
    alloc_conf: str = "",
    python: str | None = None,
    progress: Progress = silent,
    **options: Any,
) -> Trace | Judged:
    """The real training step on a device that is not there. Needs torch.

    Of a configuration, or of any `torch.nn.Module`: `trace(module, inputs)`. A module has no configuration to size, so
    what comes back has all that a trace has but `result`: events, timeline, replay, ledger, verdict.

    Args:
        source: as for `load`, or a module. A module may lie anywhere; it stays as it is.
        given: overrides, as for `load`; or the module's inputs: a tuple of positional arguments, a mapping of keyword
            arguments, or one argument, in which tensors are replaced by their like on the device.
        gpu: as for `load`.
        device: "fake": tensors without values, anywhere; "null": PyTorch's CUDA build on stub libraries, on Linux.
            Modules run on the fake one.
        steps: optimizer steps to run.
        semantics: "cuda" or "cpu": whose operators run on fake tensors.
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF.
        python: for the null device, an interpreter whose torch is a CUDA build; None: $MEMCALC_NULL_PYTHON or this one.
        progress: told how far the work is.
        options: of a module's step: loss, optimizer, autocast, zero_grad, gradient_accumulation_steps; see
            `memcalc.step.module_run.ModuleStep`.
    """
    from memcalc.errors import InputError
    from memcalc.tracing.module import is_module, trace_module

    if is_module(source):
        if device != "fake" or len(given) != 1:
            raise InputError(
                f"a module was given with device = {device!r} and {len(given)} inputs.",
                "Call trace(module, inputs), several inputs as one tuple; modules run on the fake device.",
                "module",
            )
        return trace_module(source, given[0], gpu, steps, semantics, alloc_conf, progress, **options)
    if options:
        raise InputError(
            f"{', '.join(options)}: only a module is traced with these.",
            "Write them into the configuration's training block.",
            "trace",
        )
    spec = of_training(load(cast("Source", source), *given, gpu=gpu), "trace")
    if device == "null":
        from memcalc.nullcuda.tracing import trace as trace_on_null

        return trace_on_null(spec, steps, alloc_conf, python, progress)
    if device != "fake":
        raise InputError(f"device = {device!r} is not known to trace.", "Name fake or null.", "--device")
    from memcalc.tracing import trace as trace_on_fake

    return trace_on_fake(spec, steps, semantics, alloc_conf, progress)


def measure(
    source: Source,
    *overrides: str,
    gpu: str | None = None,
    device: str | None = None,
    steps: int = 3,
    record: str | Path | None = None,
    alloc_conf: str = "",
    python: str | None = None,
    headroom: bool = False,
    force: bool = False,
) -> Measurement:
    """What a device really holds while it runs the training step, in a process of its own. Needs torch.

    Args:
        source: as for `load`.
        overrides: as for `load`.
        gpu: as for `load`.
        device: "cuda", "cuda:1" or "cpu"; "null:<card>" for a rehearsal on a card that is not there; default: the GPU.
        steps: optimizer steps to run.
        record: a file that every figure is appended to, for later comparison.
        alloc_conf: PYTORCH_CUDA_ALLOC_CONF of the run; "" leaves what the environment says.
        python: for a null device, an interpreter whose torch is a CUDA build; None: $MEMCALC_NULL_PYTHON or this one.
        headroom: do not start a run that the estimate says cannot fit.
        force: start it all the same, and on a device that others use.
    """
    from memcalc.proving.one import How, measure_one

    how = How(device, steps, record, alloc_conf, python, headroom, force)
    return measure_one(of_training(load(source, *overrides, gpu=gpu), "measure"), how)


def measure_suite(
    suite: str | Path,
    record: str | Path,
    *,
    device: str | None = None,
    python: str | None = None,
    progress: Progress = silent,
) -> Outcome:
    """Many runs measured, one after the other; what the file of records has of this device is not measured again.

    Args:
        suite: a file of runs, see docs/measure.md.
        record: the file that each record is appended to as soon as it is made.
        device: as for `measure`.
        python: as for `measure`.
        progress: told which run it is.
    """
    from memcalc.proving.suite import load_suite, run_suite
    from memcalc.proving.workers import worker_for

    runs = load_suite(suite)
    with worker_for(device, python) as (worker, name):
        return run_suite(runs, worker, name, Path(record), progress)


def compare_records(
    records: str | Path,
    *traces: str,
    record: str | Path | None = None,
    python: str | None = None,
    progress: Progress = silent,
) -> Compared:
    """Traces of runs that were measured before, anywhere, laid beside their records. Nothing is measured again.

    Args:
        records: a file that `measure` wrote.
        traces: "fake", "null" or both; without any, the estimate alone.
        record: the file that traces are read from and appended to; None: beside the records, "-traces" in its name.
        python: as for `measure`.
        progress: told which run it is.
    """
    from memcalc.proving.afterwards import compare_records as lay_beside

    source = Path(records)
    kept = source.with_name(f"{source.stem}-traces{source.suffix}") if record is None else Path(record)
    return lay_beside(source, kept, traces, python, progress)


def beside(measurement: Measurement, *traces: str, python: str | None = None, progress: Progress = silent) -> Beside:
    """The estimate, and traces on devices that are not there, beside a measured run.

    Args:
        measurement: of `measure`.
        traces: "fake", "null" or both; without any, the estimate alone.
        python: as for `measure`.
        progress: told how far the traces are.
    """
    from memcalc.proving.beside import beside as lay_beside

    return lay_beside(measurement, traces, python, progress)


def dry_run(
    command: Sequence[str],
    *,
    gpu: str,
    gpus: int = 1,
    timeout: float | None = None,
    **options: Unpack[Options],
) -> DryRun:
    """Any training command on GPUs that are not there, each process of it sized. Needs Linux and a C compiler.

    Args:
        command: the program and its arguments; its Python has a CUDA build of torch.
        gpu: a card of `memcalc gpus`.
        gpus: how many of it.
        timeout: seconds after which the command and all that it started is ended.
        options: steps, skip_init, random_weights, delayed_events, world_size, rank, history: see
            `memcalc.nullcuda.options.Options`.
    """
    from memcalc.nullcuda import run

    return run(command, gpu, gpus=gpus, timeout=timeout, **options)


def replay(
    source: Source,
    *overrides: str,
    gpu: str | None = None,
    device: int | None = None,
    progress: Progress = silent,
    **options: Unpack[Question],
) -> Replay:
    """A run's memory through an allocator, and beside other settings and allocators.

    Args:
        source: a file of events, a memory snapshot of PyTorch, or what `load` takes, which is traced.
        overrides: as for `load`.
        gpu: the card; None for that of the configuration, else for a device that never runs out.
        device: the number of the device in a snapshot.
        progress: told how far a trace is.
        options: allocator, alloc_conf, release, memory_fraction, sweep, compare: see
            `memcalc.replaying.options.Question`.
    """
    from memcalc.replaying import replaying
    from memcalc.replaying.sources import open_source
    from memcalc.spec.cards import find_card

    path = source if isinstance(source, str | Path) else None
    opened = open_source(path, lambda: of_training(load(source, *overrides, gpu=gpu), "replay"), device, progress)
    named = gpu or opened.gpu
    return replaying(opened, find_card(named) if named is not None else None, **options)


def check(
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
) -> CheckReport:
    """Whether every configuration under `paths` fits.

    Args:
        paths: files, folders and patterns; none: those of the settings.
        overrides: as for `load`, for all of them.
        gpu: the card to judge all by; default: the settings', else each file's own.
        budget: what no GPU may exceed, in bytes or as "70GiB".
        margin: what must stay free below card and budget: "5%", "2GiB".
        baseline: the JSON of an earlier check, to compare with.
        max_growth: by how much a peak may exceed the baseline's: "1%", "0"; default: by any.
        jobs: processes; default: one a core where there is enough to do.
        settings: a settings file; default: memcalc.toml or [tool.memcalc] in this folder or above.
        skip_others: skip files that are no configurations even where they are named.
    """
    from memcalc.checking.amount import parse_amount, parse_budget
    from memcalc.checking.check import check as check_paths
    from memcalc.checking.finding import policy_for
    from memcalc.checking.policy import Limits

    asked = Limits(
        gpu,
        _read("--budget", budget, parse_budget) if isinstance(budget, str) else budget,
        None if margin is None else _read("--margin", margin, parse_amount),
        None if max_growth is None else _read("--max-growth", max_growth, parse_amount),
        tuple(overrides),
    )
    policy = policy_for(settings)
    return check_paths(paths, asked, policy, baseline=baseline, jobs=jobs, skip_others=skip_others)


def _read(option: str, text: str, parse: Callable[[str], _T]) -> _T:
    """A value in words, and in a message about it the option that it was given for."""
    from memcalc.errors import InputError

    try:
        return parse(text)
    except InputError as error:
        raise error.located(option) from None


def sweep(
    source: Source,
    axes: Mapping[Any, Iterable[object]] | Grid,
    *overrides: str,
    gpu: str | None = None,
    gpus_per_node: int | None = None,
) -> Table:
    """Every configuration of a grid, sized as `estimate` sizes it: arrays with an entry for each. Loads NumPy.

    Args:
        source: as for `load`.
        axes: the values of each field: {"b": range(1, 65), "recompute": ["none", "full"]}. A tuple of names with tuples
            of values is one axis: fields that change together.
        overrides: as for `load`, applied to all.
        gpu: as for `load`.
        gpus_per_node: leave out what splits tensors over more GPUs than a node has.
    """
    from memcalc.engine import evaluate

    return evaluate(source, axes, *overrides, gpu=gpu, gpus_per_node=gpus_per_node)


def diff(a: Source, b: Source, *overrides: str, gpu: str | None = None) -> Comparison:
    """Two runs beside each other: components at each one's peak, and phases. Overrides apply to both."""
    from memcalc.checking.comparison import compare

    return compare(estimate(a, *overrides, gpu=gpu), estimate(b, *overrides, gpu=gpu))


def fit(
    source: Source,
    *overrides: str,
    gpu: str | None = None,
    gpus: int | None = None,
    maximize: str | None = None,
    minimize: str | None = None,
    hold: Sequence[str] = (),
    **options: Unpack[Cluster],
) -> Fit:
    """What fits: the largest batch and sequence, the fewest cards, the best layouts, the smallest changes.

    Args:
        source: as for `load`.
        overrides: as for `load`.
        gpu: as for `load`; a card must be named here or in the configuration.
        gpus: how many of them; None: as many as the configuration is spread over.
        maximize: one quantity alone: micro_batch_size, sequence_length, layers or parameters.
        minimize: one quantity alone: gpus, gpu_kind or recompute.
        hold: fields of the parallelism, `micro_batch_size` or `recompute`, that every layout keeps as they are.
        options: node, nic_gbit, top: see `memcalc.fitting.answer.Question`.
    """
    from memcalc.fitting.answer import Question
    from memcalc.fitting.fit import fit as fit_spec

    question = Question(gpus=gpus, maximize=maximize, minimize=minimize, hold=tuple(hold), **options)
    return fit_spec(of_training(load(source, *overrides, gpu=gpu), "fit"), question)


def recompute(
    source: Source,
    *overrides: str,
    gpu: str | None = None,
    budget: int | str | None = None,
    strategy: str = "optimal",
    maximize: bool = False,
    host_gb_per_second: float = 25.0,
) -> Planning:
    """Which activations to keep, and which to compute a second time. No torch.

    Args:
        source: as for `load`; what it says of recomputation is left aside.
        overrides: as for `load`.
        gpu: as for `load`.
        budget: bytes that a GPU may hold, or "70GiB"; None: the card's.
        strategy: "optimal"; "selective", inside the layers, for which it needs SciPy; or a rule: "none",
            "every-layer", "sqrt", "every-k", "smallest".
        maximize: whether to raise micro_batch_size as far as a plan fits.
        host_gb_per_second: 10^9 bytes a second each way to the host, for offload beside it; PCIe 4.0 x16 may reach 25.

    Raises:
        DoesNotFit: no plan is small enough; the message says what the smallest needs, and what holds it.
    """
    from memcalc.planning.planning import plan_recompute
    from memcalc.units import parse_bytes

    limit = parse_bytes(budget) if isinstance(budget, str) else budget
    spec = of_training(load(source, *overrides, gpu=gpu), "recompute")
    link = round(host_gb_per_second * 10**9)
    return plan_recompute(spec, limit, strategy, maximize=maximize, host_bytes_per_second=link)


def describes_chain(path: str) -> bool:
    """Whether this is a file that describes a chain of blocks (docs/recompute.md), not a model."""
    from memcalc.planning.described import describes_chain as looks_like_one

    return looks_like_one(path)


def recompute_chain(
    path: str, *, gpu: str | None = None, budget: int | str | None = None, strategy: str = "optimal"
) -> ChainPlanning:
    """Which blocks of a chain to keep that a YAML file describes. No torch.

    Args:
        path: of the file.
        gpu: the card, less its context and what the allocator cannot use.
        budget: bytes that may be allocated, or "20GiB".
        strategy: as of `recompute`, but for "selective".

    Raises:
        DoesNotFit: no plan is small enough.
    """
    from memcalc.planning.described import plan_chain
    from memcalc.units import parse_bytes

    return plan_chain(path, parse_bytes(budget) if isinstance(budget, str) else budget, gpu, strategy)


def verified(
    planning: Planning, devices: tuple[str, ...] = ("fake", "null"), python: str | None = None
) -> list[Verified]:
    """A planned step traced: on each device the phases with their planned and their traced bytes. Needs torch.

    Args:
        planning: of `recompute`.
        devices: "fake": tensors without values; "null": PyTorch's CUDA build without a GPU, told as missing where it
            is not there and not asked for alone.
        python: as for `trace`.
    """
    from memcalc.planning.verification import verified as trace_planned

    return trace_planned(planning, devices, python)


def oom(
    log: str | Path, config: Source | None = None, *overrides: str, gpu: str | None = None, report: int = 1
) -> Diagnosis:
    """Why the run that wrote `log` ran out of memory, and what to try.

    Args:
        log: a path, or "-" for standard input; read as a stream, so that its size does not matter.
        config: the run's configuration, as for `load`: the advice becomes numbers.
        overrides: as for `load`.
        gpu: as for `load`.
        report: which of the log's reports to explain, from 1.
    """
    from memcalc.diagnosis.diagnosis import diagnose
    from memcalc.diagnosis.streams import open_log

    spec = None if config is None else of_training(load(config, *overrides, gpu=gpu), "oom")
    with open_log(log) as (name, stream):
        return diagnose(name, stream, spec, report)
