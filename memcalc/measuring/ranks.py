"""One rank of a multi-rank job started by torchrun: every rank measures itself, then all exchange their records."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memcalc.directories import temporary_compiler_cache, temporary_directory
from memcalc.errors import InputError
from memcalc.measuring.job import Job
from memcalc.measuring.measure import RecordNotWritten, append_record, measured, typed, unwritten
from memcalc.measuring.measurement import Measurement
from memcalc.measuring.records import RECORDS
from memcalc.spec.spec import Spec

LETTING_GO = 0.005  # seconds, enough for the gloo thread to run on a busy machine


@dataclass(frozen=True)
class RankPlace:
    """This process's rank, the number of ranks, and its local rank, from torchrun's environment."""

    rank: int
    ranks: int
    local: int


def place() -> RankPlace | None:
    """Return this process's place; None if it is not one of several ranks."""
    try:
        found = RankPlace(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    except (KeyError, ValueError):
        return None
    return found if found.ranks > 1 else None


def measure_rank(
    spec: Spec,
    here: RankPlace,
    device: str,
    steps: int,
    record: str | Path | None,
    *,
    alloc_conf: str = "",
    force: bool = False,
) -> tuple[Measurement, tuple[dict[str, Any], ...]]:
    """Measure this rank, and gather the records of all ranks.

    Args:
        spec: the run, equal on all ranks.
        here: this rank.
        device: device of this rank, see `device_of_rank`.
        steps: optimizer steps.
        record: file that rank 0 appends all records to; a rank that runs out of memory appends its own.
        alloc_conf: see `measure`.
        force: see `measure`.

    Raises:
        InputError: the step cannot run the spec.
        Unavailable: a requirement is missing or busy.
        RanOut: this rank ran out of memory.
        NotKept: the record could not be written.
    """
    from memcalc.measuring.run_process import perform

    if record is not None:
        RECORDS.check(Path(record))
    # Offloaded tensors are reduced on the CPU too, for example gradient norms when gradients are clipped.
    on_device = "cpu:gloo,cuda:nccl" if spec.parallelism.weights_on_host else "nccl"
    backend = "gloo" if device == "cpu" else on_device
    with (
        temporary_compiler_cache(),
        process_group(backend, here) as gather,
        temporary_directory("memcalc-rank-") as folder,
    ):
        job = Job(spec, steps, device, alloc_conf, f"{folder}/events.jsonl", force)
        found = measured(job, perform(job), typed())
        measurement = replace(found, rank=here.rank, ranks=here.ranks)
        if measurement.message is not None:
            append_record(measurement, record)
        records = tuple(gather(measurement.to_record()))
    unkept = unwritten(records, record) if record is not None and here.rank == 0 else None
    if unkept is not None:
        raise RecordNotWritten(str(unkept), measurement)
    return measurement, records


def device_of_rank(asked: str | None, here: RankPlace) -> str:
    """Return the device of a rank: for "cuda" or None, the GPU with its local rank.

    Raises:
        InputError: one device was given for all ranks.
    """
    if asked == "cpu":
        return asked
    if asked in (None, "cuda"):
        return f"cuda:{here.local}"
    raise InputError(
        f"--device {asked} does not suit {here.ranks} ranks.",
        "Name cpu or cuda: each rank uses the GPU of its number. For a null device use `memcalc dry-run`.",
        "--device",
    )


def refuse_other_ranks(spec: Spec, started: int) -> None:
    """Check that torchrun started as many ranks as the configuration has.

    Raises:
        InputError: there are more or fewer.
    """
    parallelism = spec.parallelism
    if parallelism.ranks == started:
        return
    others = parallelism.ranks // parallelism.data_parallel
    has = f"data_parallel = {parallelism.data_parallel}"
    if parallelism.tensor_parallel > 1:
        has += f" x tensor_parallel = {parallelism.tensor_parallel}"
    wanted = f"Add --set data_parallel={started // others}, or start" if started % others == 0 else "Start"
    raise InputError(
        f"{has}, but {started} ranks were started.",
        f"{wanted} as many ranks as the configuration has.",
        "parallelism.data_parallel",
    )


@contextmanager
def process_group(backend: str, here: RankPlace) -> Iterator[Any]:
    """Yield a function that gathers an object of each rank, in host memory, so that no GPU allocates for it."""
    import torch
    import torch.distributed as dist

    if backend != "gloo":
        torch.cuda.set_device(here.local)
    dist.init_process_group(backend)
    waits = dist.Work.wait
    if backend == "gloo":
        dist.Work.wait = _patient(waits)  # type: ignore[method-assign]
    try:

        def gather(record: dict[str, Any]) -> list[dict[str, Any]]:
            group = dist.new_group(backend="gloo")
            found: list[dict[str, Any]] = [{}] * here.ranks
            dist.all_gather_object(found, record, group=group)
            return found

        yield gather
    finally:
        dist.Work.wait = waits  # type: ignore[method-assign]
        dist.destroy_process_group()


def _patient(wait: Callable[..., bool]) -> Callable[..., bool]:
    """Return `Work.wait` with a delay in which gloo's thread frees a collective's buffers.

    The thread frees them after it has woken the rank (ProcessGroupGloo::runLoop). On a busy machine the rank may go on
    first, and the buffers would occasionally be counted in the rank's next allocations.
    """

    def patiently(*args: Any, **options: Any) -> bool:
        done = wait(*args, **options)
        time.sleep(LETTING_GO)
        return done

    return patiently
