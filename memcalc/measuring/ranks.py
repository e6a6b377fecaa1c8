"""One rank of many, started by torchrun: every rank measures itself, and all hear what the others found."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memcalc.errors import InputError
from memcalc.folders import temporary_compiler_cache, temporary_folder
from memcalc.measuring.job import Job
from memcalc.measuring.measure import NotKept, keep, measured, typed, unwritten
from memcalc.measuring.measurement import Measurement
from memcalc.measuring.records import RECORDS
from memcalc.spec.spec import Spec

LETTING_GO = 0.005  # seconds, in which the thread gets to run on a machine that others use, too


@dataclass(frozen=True)
class Place:
    """Which rank this process is, as torchrun says: of all, and of those on its machine."""

    rank: int
    ranks: int
    local: int


def place() -> Place | None:
    """This process's place; None where it was not started as one of several."""
    try:
        found = Place(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    except (KeyError, ValueError):
        return None
    return found if found.ranks > 1 else None


def measure_rank(
    spec: Spec,
    here: Place,
    device: str,
    steps: int,
    record: str | Path | None,
    *,
    alloc_conf: str = "",
    force: bool = False,
) -> tuple[Measurement, tuple[dict[str, Any], ...]]:
    """Measures this rank, and gathers the records of all.

    Args:
        spec: the run, as all ranks have it.
        here: which rank this is.
        device: of this rank, see `device_of_rank`.
        steps: optimizer steps.
        record: a file that rank 0 appends the records of all ranks to; a rank that runs out of memory its own.
        alloc_conf: see `measure`.
        force: see `measure`.

    Raises:
        InputError: the step cannot run what the spec asks for.
        Unavailable: something is missing or busy.
        RanOut: this rank ran out of memory.
        NotKept: the record could not be written.
    """
    from memcalc.measuring.child import perform

    if record is not None:
        RECORDS.check(Path(record))
    # What is offloaded is reduced on the host, too: norms of gradients, where they are clipped.
    on_device = "cpu:gloo,cuda:nccl" if spec.parallelism.weights_on_host else "nccl"
    backend = "gloo" if device == "cpu" else on_device
    with (
        temporary_compiler_cache(),
        process_group(backend, here) as gather,
        temporary_folder("memcalc-rank-") as folder,
    ):
        job = Job(spec, steps, device, alloc_conf, f"{folder}/events.jsonl", force)
        found = measured(job, perform(job), typed())
        measurement = replace(found, rank=here.rank, ranks=here.ranks)
        if measurement.message is not None:
            keep(measurement, record)
        records = tuple(gather(measurement.to_record()))
    unkept = unwritten(records, record) if record is not None and here.rank == 0 else None
    if unkept is not None:
        raise NotKept(str(unkept), measurement)
    return measurement, records


def device_of_rank(asked: str | None, here: Place) -> str:
    """The device of a rank: with "cuda" or nothing asked, the GPU of its number on this machine.

    Raises:
        InputError: one device was asked for, for all.
    """
    if asked == "cpu":
        return asked
    if asked in (None, "cuda"):
        return f"cuda:{here.local}"
    raise InputError(
        f"--device {asked}, for each of {here.ranks} ranks.",
        "Say cpu or cuda: a rank takes the GPU of its own number. A null device has ranks in `memcalc dry-run`.",
        "--device",
    )


def refuse_other_ranks(spec: Spec, started: int) -> None:
    """The configuration's ranks are those that torchrun has started.

    Raises:
        InputError: they are more or fewer.
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
def process_group(backend: str, here: Place) -> Iterator[Any]:
    """The ranks' process group, and how to gather an object of each: on the host, so that no GPU holds it."""
    import torch
    import torch.distributed as dist

    if backend != "gloo":
        torch.cuda.set_device(here.local)
    dist.init_process_group(backend)
    waits = dist.Work.wait
    if backend == "gloo":
        dist.Work.wait = _patient(waits)  # type: ignore[method-assign]
    try:

        def gather(own: dict[str, Any]) -> list[dict[str, Any]]:
            group = dist.new_group(backend="gloo")
            found: list[dict[str, Any]] = [{}] * here.ranks
            dist.all_gather_object(found, own, group=group)
            return found

        yield gather
    finally:
        dist.Work.wait = waits  # type: ignore[method-assign]
        dist.destroy_process_group()


def _patient(wait: Callable[..., bool]) -> Callable[..., bool]:
    """`Work.wait` that gives gloo's thread the time to let go of a collective's buffers.

    It does so after it has woken the rank (ProcessGroupGloo::runLoop); on a busy machine the rank has gone on by then,
    and the buffers would count in what the rank holds next, now and then.
    """

    def patiently(*args: Any, **options: Any) -> bool:
        done = wait(*args, **options)
        time.sleep(LETTING_GO)
        return done

    return patiently
