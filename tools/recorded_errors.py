"""Errors of estimated reserved memory on recorded runs, by run type: the data of every interval.

    python tools/recorded_errors.py

writes memcalc/data/recorded_errors.json from the raw records in benchmarks/recordings. Docs show it as a table, and
tests hold the file to the records.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from benchmarks.programs.compare import settings, write_files
from benchmarks.programs.compiled import FAMILIES as COMPILED
from benchmarks.programs.program import Family
from benchmarks.programs.registry import FAMILIES
from benchmarks.record_generation import spec_of
from benchmarks.verdict_runs import loaded
from memcalc.errors import InputError
from memcalc.estimation.limits import limits_of
from memcalc.importers.loading import load as load_any
from memcalc.layout.stages import stages_of
from memcalc.ledger.verdict import holding_memory
from memcalc.measuring.result import allocator_conf
from memcalc.simulation.simulated_run import SimulatedRun, simulate
from memcalc.spec.hardware.gpus import all_gpus
from memcalc.spec.limits import most_overcounted
from memcalc.spec.loading import load
from memcalc.spec.programs import VersionsSpec
from memcalc.spec.spec import Spec
from memcalc.states.pipelining import lists_sent
from memcalc.stream.requests import DelayedRequests, replay
from memcalc.validation.predictions import under
from memcalc.verdict.needs import can_replay, need_of
from memcalc.verdict.recorded_errors import FILE
from memcalc.verdict.run_types import kinds_of, program_kinds

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
RECORDINGS, PUBLISHED = BENCHMARKS / "recordings", BENCHMARKS / "published" / "reserved.yaml"
ALONE = (
    ".",
    "drawn",
    "activation-offload",
    "gpu/*",
)  # runs of one GPU, as `measure` records them
SAMPLED = ("allocator-settings", "fields", "sampled")  # as benchmarks/verdict_runs.py records them
RANKS = (
    "reserved/*.jsonl",
    "sharded/*-fsdp1*.jsonl",
    "float8/*-split*.jsonl",
    "gpu/*/ranks-*.jsonl",
)  # one rank of many, as benchmarks/record_sharded.py records them
# The same where work of a stream is complete only when the host waits for it; here it does once a step, as programs do
# that read the loss. If it never does (without-waits/), more is reserved with each step.
DELAYED = ("delayed-events/*.jsonl",)
GENERATIONS = "generation/reserved-*.jsonl"  # as benchmarks/record_generation.py records them
OTHER_RANK = " rank="  # a word of the cases of other ranks than the first; of these, stages of pipelines are replayed
CENTRAL = 0.95  # of the errors of a kind, what its interval holds
DIGITS = 6
ENOUGH = 20  # runs with an interval of their own, as in memcalc/verdict/recorded_errors.py


class Recorded(NamedTuple):
    """A recorded run. Bytes.

    Args:
        name: its record's command or case.
        device: that it ran on.
        spec: the run, under the PyTorch and the allocator settings that it ran with.
        allocated: its peak.
        reserved: the peak of reserved memory.
        stage: the pipeline stage that ran.
    """

    name: str
    device: str
    spec: Spec
    allocated: int
    reserved: int
    stage: int = 0


class Compared(NamedTuple):
    """A recorded run and its estimate.

    Args:
        run: the record.
        estimated: the reserved memory of its replay; None where the run cannot be replayed.
        allocated: the peak of its replay.
    """

    run: Recorded
    estimated: int | None
    allocated: int | None

    @property
    def error(self) -> float:
        """Of the replay's reserved memory, as a fraction of it: positive where the run reserved more."""
        assert self.estimated is not None
        return self.run.reserved / self.estimated - 1


def recorded_runs() -> Iterator[Recorded]:
    """All records that have reserved memory, of runs that ended; each run on each device once."""
    seen: set[tuple[str, str, str]] = set()
    for run in (*_alone(), *_sampled(), *_ranks(), *_generations()):
        key = run.name, run.device, run.spec.training.torch_version
        if key not in seen:
            seen.add(key)
            yield run


def _alone() -> Iterator[Recorded]:
    for folder in ALONE:
        for path in sorted(RECORDINGS.glob(f"{folder}/*.jsonl")):
            for record in _lines(path):
                alone = record.get("outcome") == "done" and record.get("ranks") == 1
                if alone and (run := _of_measure(record)) is not None:
                    yield run


def _sampled() -> Iterator[Recorded]:
    """Runs as benchmarks/verdict_runs.py records them, with allocator settings. Runs near their limit stay out."""
    for path in (path for folder in SAMPLED for path in sorted(RECORDINGS.glob(f"{folder}/*.jsonl"))):
        for record in _lines(path):
            if record.get("outcome") == "done" and "case" in record:
                spec = under(loaded(record["case"]), record["versions"]["torch"])
                device = f"null:{spec.hardware.gpu}"
                if is_claimed(spec) and not differs_without_values(spec):
                    yield Recorded(record["case"], device, spec, record["allocated_bytes"], record["reserved_bytes"])


def differs_without_values(spec: Spec) -> bool:
    """Whether three steps on a device that computes no values are not those of training.

    ASGD's loop makes a tensor more unless mu is 1 (torch/optim/asgd.py), and RAdam rectifies from the sixth step on.
    """
    return spec.training.optimizer in ("asgd", "radam")


def is_claimed(spec: Spec) -> bool:
    """Whether nothing that the screen names changes the memory of the run: then the replay claims to be exact."""
    return not any(limit.holds_memory or limit.overcounts != "nothing" for limit in limits_of(spec))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())


def _of_measure(record: dict[str, Any]) -> Recorded | None:
    peaks = [phase["peak_reserved_bytes"] for phase in record["phases"]]
    if not peaks or None in peaks:
        return None  # the CPU has no such allocator
    device = record["device"]
    card = next((card.name for card in all_gpus() if card.device_name == device["name"]), None)
    if device["kind"] == "null cuda":
        card = device["identifier"].partition(":")[2]
    try:
        spec = load(record["spec"], (), gpu=card)
    except InputError:
        return None
    spec = under(spec, record["versions"]["torch"]).with_training(alloc_conf=allocator_conf(record["allocator"]))
    allocated = max(phase["peak_allocated_bytes"] for phase in record["phases"])
    return Recorded(record["command"], device["name"], spec, allocated, max(peaks))


def delayed_runs() -> Iterator[Recorded]:
    """Ranks under `--delayed-events`: blocks that another stream uses are free only after an event."""
    return _ranks(DELAYED)


def _ranks(folders: Iterable[str] = RANKS) -> Iterator[Recorded]:
    for files in folders:
        for path in sorted(RECORDINGS.glob(files)):
            for record in _lines(path):
                spec = recorded_spec(record)
                if not references_sent(record, spec):
                    continue
                allocated, reserved = (max(record[part].values()) for part in ("phases", "reserved"))
                rank = int(record["case"].partition(OTHER_RANK)[2].split()[0]) if OTHER_RANK in record["case"] else 0
                stage = rank * spec.parallelism.pipeline_parallel // spec.parallelism.ranks
                if rank == 0 or spec.parallelism.pipeline_parallel > 1:
                    yield Recorded(record["case"], record["device"], spec, allocated, reserved, stage)


def references_sent(record: dict[str, Any], spec: Spec) -> bool:
    """Return whether the process group of a record references what a schedule of several chunks has sent.

    PyTorch's fake one does not, so these records are of less memory than NCCL needs; they were recorded again.
    """
    return not lists_sent(spec) or record.get("process_group") == "nccl"


def recorded_spec(record: dict[str, Any]) -> Spec:
    """Return the run of a record of benchmarks/record_sharded.py, under the releases that it ran with."""
    releases = record["versions"]
    spec = under(load(record["spec"], (), gpu=_gpu_of(record["device"])), releases["torch"])
    if "deepspeed" not in releases:
        return spec
    training = spec.training.model_copy(update={"versions": VersionsSpec(deepspeed=releases["deepspeed"])})
    return spec.model_copy(update={"training": training})


def _gpu_of(device: str) -> str | None:
    """Return a recorded device's name in `memcalc gpus`."""
    simulated = device.partition(":")[2]
    return simulated or next((gpu.name for gpu in all_gpus() if gpu.device_name == device), None)


def _generations() -> Iterator[Recorded]:
    for path in sorted(RECORDINGS.glob(GENERATIONS)):
        for record in _lines(path):
            spec = spec_of(record["case"], record["device"].partition(":")[2] or None)
            spec = under(spec, record["versions"]["torch"])
            yield Recorded(
                record["case"], record["device"], spec, max(record["phases"].values()), record["reserved_bytes"]
            )


def compiled_runs() -> Iterator[Recorded]:
    """Programs that compile their models."""
    return programs_of(COMPILED)


def program_runs() -> Iterator[Recorded]:
    """Programs of frameworks in eager execution."""
    return programs_of(FAMILIES[name] for name in FAMILIES if FAMILIES[name] not in COMPILED)


def programs_of(families: Iterable[Family]) -> Iterator[Recorded]:
    """Recorded programs, each with the spec of its own file; those with a rejected file stay out."""
    for family in families:
        for path in sorted(RECORDINGS.glob(f"programs/*/{family.name}.jsonl")):
            for record in filter(itemgetter("good"), _lines(path)):
                try:
                    spec = under(spec_of_program(record), record["versions"]["torch"])
                except InputError:
                    continue
                name = f"{family.name} {record['seed']} {record['number']}"
                rank = max(record["ranks"], key=lambda rank: rank["reserved_bytes"] + rank["communication_bytes"])
                stage = record["ranks"].index(rank) * spec.parallelism.pipeline_parallel // len(record["ranks"])
                allocated, reserved = rank["allocated_bytes"], rank["reserved_bytes"]
                yield Recorded(name, f"null:{record['card']}", spec, allocated, reserved, stage)


def spec_of_program(record: dict[str, Any]) -> Spec:
    """Return the run of a recorded program's own file, with its framework and its releases."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(record, folder)
        return load_any(Path(folder, record["sized"]["file"]), settings(record, named=True), gpu=record["card"])


def compared(run: Recorded) -> Compared:
    """A record with the replay of its run."""
    if not can_replay(run.spec):
        return Compared(run, None, None)
    found = simulate(run.spec, stage=stages_of(run.spec)[run.stage], rank=0)
    return Compared(run, found.reserved_bytes, max(whole for whole, _ in found.tops.values()))


def compared_late(run: Recorded) -> Compared:
    """A record with delayed events, with the replay of its run with late streams.

    The records' process group is PyTorch's fake one: its collectives do not run, so none waits for another.
    """
    late = replay(SimulatedRun(run.spec, DelayedRequests(collectives_in_order=False), rank=0).play())
    return Compared(run, late.reserved_bytes, None)


def program_error(run: Recorded) -> float | None:
    """The error of a program's replay; 0 for a reserved memory between those of its orders of batch lengths.

    None where nothing is replayed, where memory is not modelled, and where too much is counted: such a run has a lower
    or an upper bound, not an interval.
    """
    limits = limits_of(run.spec)
    if holding_memory(limits) or most_overcounted(limits) != "nothing":
        return None
    gpu = run.spec.gpu
    need = need_of(run.spec, gpu)
    if need.overhead is None:
        return None
    return run.reserved / min(max(run.reserved, need.least_reserved_bytes), need.most_reserved_bytes) - 1


def errors(
    runs: list[Compared], compiled: list[Compared], delayed: list[Compared], programs: Mapping[str, list[float]]
) -> dict[str, Any]:
    """The file's content.

    Args:
        runs: of memcalc's own training step in eager execution.
        compiled: programs that compile their models.
        delayed: runs with delayed events, each with its replay with late streams.
        programs: errors of the replays of programs by kind.
    """
    replayed: dict[str, list[Compared]] = {}
    ratios: dict[str, list[float]] = {}
    for each in runs:
        ratio = each.run.reserved / each.run.allocated
        for kind in kinds_of(each.run.spec):
            if each.estimated is not None:
                replayed.setdefault(kind, []).append(each)
            ratios.setdefault(kind, []).append(ratio)
        ratios.setdefault("", []).append(ratio)
    late: dict[str, list[float]] = {}
    for each in delayed:
        late.setdefault(kinds_of(each.run.spec)[0], []).append(each.error)
    ranges = {kind: _range(found) for kind, found in sorted(ratios.items())}
    return {
        "replayed": {kind: _of_kind(found, late.get(kind, [])) for kind, found in sorted(replayed.items())}
        | {kind: _interval(found) for kind, found in sorted(programs.items())},
        "compiled": _full_range([each.error for each in compiled]),
        "reserved over allocated": ranges | {kind: _published(each) for kind, each in published().items()},
    }


def program_errors() -> dict[str, list[float]]:
    """The errors of the replays of programs, by kind."""
    found: dict[str, list[float]] = {}
    for run in program_runs():
        error = program_error(run)
        if error is not None:
            for kind in program_kinds(run.spec):
                found.setdefault(kind, []).append(error)
    return found


def _of_kind(found: list[Compared], late: list[float]) -> dict[str, Any]:
    """Errors of a kind. Their interval also contains the central ones on real GPUs, of which the null device is none.

    On a real GPU a block that another CUDA stream has used waits for an event, which takes as long as the GPU does. The
    interval contains all errors of replays with streams that are as late as they can be, where these were recorded.
    """
    errors = _interval([each.error for each in found])
    if late:
        errors["high"] = max(errors["high"], _full_range(late)["high"])
    real = [each.error for each in found if each.run.device.startswith("NVIDIA")]
    if len(real) < ENOUGH:
        return errors
    on_gpus = _interval(real)
    return errors | {"low": min(errors["low"], on_gpus["low"]), "high": max(errors["high"], on_gpus["high"])}


def _full_range(found: list[float]) -> dict[str, Any]:
    """Errors with their full range, rounded outwards."""
    least, most = min(found) - 0.5 * 10**-DIGITS, max(found) + 0.5 * 10**-DIGITS
    return _interval(found) | {"low": round(least, DIGITS), "high": round(most, DIGITS)}


def _interval(found: list[float]) -> dict[str, Any]:
    ordered = sorted(found)
    outside = int((1 - CENTRAL) / 2 * len(ordered))  # of each side
    return {
        "runs": len(ordered),
        "exact": sum(error == 0 for error in ordered),
        "median": round(median(map(abs, ordered)), DIGITS),
        "worst": round(ordered[0] if -ordered[0] > ordered[-1] else ordered[-1], DIGITS),
        "low": round(ordered[outside], DIGITS),
        "high": round(ordered[-1 - outside], DIGITS),
    }


def _range(found: list[float]) -> dict[str, Any]:
    middle = median(found)
    return {
        "runs": len(found),
        "median": round(middle, DIGITS),
        "spread": round(median(abs(ratio / middle - 1) for ratio in found), DIGITS),
        "least": round(min(found) - 0.5 * 10**-DIGITS, DIGITS),
        "most": round(max(found) + 0.5 * 10**-DIGITS, DIGITS),
    }


def published() -> dict[str, dict[str, float]]:
    """Ranges that others published, by kind."""
    found: dict[str, dict[str, float]] = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    return found


def _published(found: dict[str, float]) -> dict[str, Any]:
    spread = max(found["most"] / found["median"] - 1, 1 - found["least"] / found["median"]) / 2
    return found | {"spread": round(spread, DIGITS)}


def main() -> None:
    """Write the file."""
    runs, compiled = ([compared(run) for run in found] for found in (recorded_runs(), compiled_runs()))
    found = errors(runs, compiled, [*map(compared_late, delayed_runs())], program_errors())
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
