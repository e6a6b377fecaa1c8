"""Verdicts and reserved memory compared with an H100: runs sampled near its memory, and DeepSpeed's ranks."""

import json

import pytest

from benchmarks.verdict_runs import loaded
from memcalc.measuring.measurement import DONE, OUT_OF_MEMORY
from memcalc.sharding.engines import ranks_to_replay
from memcalc.simulation.simulated_run import simulate
from memcalc.spec.loading import load
from memcalc.spec.spec import Spec
from memcalc.verdict.judge import judge, size
from memcalc.verdict.timeline import timeline_of
from tools.measured_runs import of_gpus
from tools.real_gpus import near
from tools.recorded_errors import RECORDINGS


@pytest.mark.long
def test_no_verdict_near_the_memory_of_an_h100_is_wrong() -> None:
    """The run under FSDP2 and tensor parallelism, which ran out of memory with 3.5 GiB more than NCCL leaves, is undecided."""
    verdicts = near()

    assert len(verdicts) == 15
    for record, verdict in verdicts:
        done = record["outcome"] == DONE
        assert verdict.answer == "unknown" or (verdict.answer == "fits") is done, record["case"]
    assert sum(verdict.answer == "unknown" for _, verdict in verdicts) <= 3


GRANITE = (
    "granite-3.1-8b num_layers=6 b=1 s=512 recipe=mixed-16 attention=flash dropout=0.1 optimizer=momentum "
    "optimizer_implementation=foreach implementation=plain engine=deepspeed zero_stage=2 data_parallel=8"
)


def run_of(case: str) -> Spec:
    preset, *words = case.split()
    return load(preset, words, gpu="h100-80gb")


def reserved_on_the_gpu(case: str) -> int:
    (file,) = of_gpus("ranks-20261127")
    (record,) = (found for found in map(json.loads, file.read_text().splitlines()) if found["case"] == case)
    return int(max(record["reserved"].values()))


def test_the_first_rank_of_deepspeed_stage_2_decides_where_it_reserves_most() -> None:
    """The last rank allocates most, and reserves 12 % less: 9.22 instead of 10.53 GiB."""
    run = run_of(GRANITE)
    first, last = (simulate(run, rank=rank).reserved_bytes for rank in (0, 7))
    found = size(run)

    assert first == reserved_on_the_gpu(GRANITE)
    assert last < 0.89 * first
    assert found.headline.reserved_bytes == first
    assert max(timeline_of(run, found.headline).reserved or ()) == first


def test_a_rank_between_the_first_and_the_last_decides_where_it_runs_out_of_memory() -> None:
    """Ranks 0 and 4 of this run got through on the null device, with DeepSpeed 0.19.0, and rank 3 did not."""
    lines = (RECORDINGS / "near/other-ranks-20261127.jsonl").read_text().splitlines()
    outcomes = {record["case"]: record["outcome"] for record in map(json.loads, lines)}
    ran_out, got_through = outcomes

    assert list(outcomes.values()) == [OUT_OF_MEMORY, DONE]
    assert (ran_out[-7:], got_through[-7:]) == (" rank=3", " rank=4")
    assert judge(loaded(ran_out)).answer == "does-not-fit"


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("engine=deepspeed zero_stage=2 data_parallel=8", (None, 0, 1, 2, 3, 4, 5, 6)),
        ("engine=deepspeed zero_stage=2 data_parallel=64", (None, 0, 8, 16, 24, 32, 40, 48, 56)),
        ("engine=deepspeed zero_stage=2 data_parallel=2", (None, 0)),
        ("engine=deepspeed zero_stage=1 data_parallel=8", (None, 1, 2, 3, 4, 5, 6, 7)),
        ("engine=deepspeed zero_stage=1 data_parallel=2", (None, 1)),
        ("engine=deepspeed zero_stage=1 data_parallel=8 recipe=mixed-20", (None,)),  # BF16_Optimizer
        ("engine=deepspeed zero_stage=3 data_parallel=8", (None,)),
        ("engine=fsdp2 zero_stage=3 data_parallel=8", (None,)),
        ("engine=fsdp2 zero_stage=3 context_parallel=4 context_parallel_method=ring", (None, 3)),
        ("data_parallel=1", (None,)),
    ],
)
def test_ranks_are_replayed_where_their_requests_differ(words: str, ranks: tuple[int | None, ...]) -> None:
    assert ranks_to_replay(run_of(f"llama-3.2-1b recipe=mixed-16 {words}")) == ranks
