"""DeepSpeed's pipeline engine: its schedule by hand, and replays of its stages beside recorded programs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

import memcalc
from benchmarks.programs.compare import settings, write_files
from benchmarks.programs.record import read_records, record_path
from memcalc.allocator.pytorch.constants import STREAM_SHIFT
from memcalc.estimation.estimate import estimate
from memcalc.layout.schedules import pipe_buffers
from memcalc.layout.stages import stages_of
from memcalc.sharding.deepspeed_schedule import Instruction, commands
from memcalc.simulation.simulated_run import run_requests, simulate, unsupported_reason
from memcalc.spec.spec import Spec

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
# Of the recorded programs: a stage that is not exact, and why.
MISSED: dict[tuple[str, int, int], float] = {
    # rank 1 of two holds another part of the flat tensor than the replayed rank 0
    ("development", 3, 1): 0.25,
    ("development", 8, 1): 0.32,
    ("held-out", 0, 1): 0.18,
    ("held-out", 4, 1): 0.04,
    ("held-out-10", 3, 1): 0.02,
    ("held-out-10", 7, 1): 0.2,
    # the norm's output is freed earlier in a checkpoint's forward than in the reference decoder's
    ("held-out", 1, 1): 0.01,
    # the script of these programs has a buffer of its own for each direction
    ("held-out-8", 3, 1): 0.004,
    ("held-out-8", 3, 2): 0.004,
    ("held-out-10", 4, 1): 0.004,
    ("held-out-10", 4, 2): 0.004,
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


def live_at_the_end(spec: Spec, stage: int) -> dict[int, int]:
    """Return the bytes of the storages that are live after the last step."""
    live: dict[int, int] = {}
    number = 0
    for stretch in run_requests(spec, stages_of(spec)[stage]).stretches:
        for change in stretch.script:
            if change < 0:
                del live[~change]
            else:
                live[number] = change % (1 << STREAM_SHIFT)
                number += 1
    return live


def test_what_the_buffers_reference_between_steps() -> None:
    """The first stage keeps ids and a buffer for gradients; the last one inputs, their gradients, logits and labels."""
    first, last = ([*live_at_the_end(small(), stage).values()] for stage in (0, 1))

    assert first.count(HIDDEN) == 1  # the gradient received
    assert first.count(IDS) == 2 * 2  # tokens and positions in two buffers
    assert last.count(HIDDEN) == 1 + 2 * 2  # received; an input and its gradient in two buffers
    assert last.count(LOGITS) == 2
    assert last.count(IDS) == 2


def test_a_stage_in_the_middle_has_one_buffer_to_receive_into() -> None:
    """DeepSpeed 0.19.8 runtime/pipe/engine.py, _allocate_or_extend_buffers."""
    spec = small(stages=3)

    assert [*live_at_the_end(spec, 1).values()].count(HIDDEN) == 1


@pytest.mark.parametrize("words", [(), ("recompute=full",), ("data_parallel=2",), ("dropout=0",)])
def test_formulas_count_what_the_replay_holds(words: tuple[str, ...]) -> None:
    """Requested bytes at the peak of each stage, to the last but scalars and unsplit remainders of blocks."""
    spec = small(*words)
    for rank in estimate(spec).ranks:
        tops = simulate(spec, stages_of(spec)[rank.rank["pipeline_stage"]]).asked
        assert 0 <= max(tops.values()) - rank.ledger.peak_bytes <= 2048


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


def recorded() -> list[dict[str, Any]]:
    """Programs on one to four stages."""
    seeds = ("development", "held-out", "held-out-8", "held-out-10")
    found = [record for seed in seeds for record in read_records(record_path("deepspeed-pipeline", seed))]
    return [*found, *read_records(record_path("deepspeed-pipeline-precisions", "development"))]


@pytest.mark.parametrize(
    "record", recorded(), ids=lambda record: f"{record['family']}-{record['seed']}-{record['number']}"
)
def test_recorded_stages(record: dict[str, Any]) -> None:
    """Each rank reserves what is replayed, to the byte."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(record, folder)
        path = Path(folder, record["sized"]["file"])
        spec = memcalc.load(path, *settings(record, named=True), gpu=record["card"])
    for rank in record["ranks"]:
        number = rank["rank"]
        found = simulate(spec, stages_of(spec)[number // spec.parallelism.data_parallel]).reserved_bytes
        most = MISSED.get((record["seed"], record["number"], number), 0)
        assert abs(found / rank["reserved_bytes"] - 1) <= most, number
