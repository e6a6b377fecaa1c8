"""Megatron-Core's buffers, main parameters and one-time allocations; and the recorded programs of Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import memcalc
from benchmarks.programs.compare import settings, write_files
from benchmarks.programs.record import RECORDINGS, read_records
from memcalc.allocator.pytorch.constants import STREAM_SHIFT
from memcalc.importers.loading import load
from memcalc.layout.local_parameters import LocalParameter
from memcalc.layout.stages import stages_of
from memcalc.sharding.engines import SAMPLED_RANKS, ranks_to_replay
from memcalc.sharding.megatron import BUFFER_STREAM
from memcalc.simulation.megatron_pipeline import MODEL, MegatronPipeline
from memcalc.simulation.simulated_run import SimulatedRun, run_requests, simulate, unsupported_reason
from memcalc.spec.spec import Spec
from memcalc.states.megatron_grad_buffer import buffer_elements, rank_parts
from memcalc.stream.requests import Requests
from tests.thinning import quick_every

LOCAL = ("implementation=megatron", "attention=eager", "recipe=mixed-18", "loss=vocab-parallel")
HIDDEN, LAYERS, VOCAB, LENGTH, FFN = 512, 2, 32768, 256, 2048
SIZES = (
    f"num_layers={LAYERS}",
    f"hidden_size={HIDDEN}",
    "num_attention_heads=8",
    "num_key_value_heads=8",
    "head_dim=64",
    f"intermediate_size={FFN}",
    f"vocab_size={VOCAB}",
    "tie_word_embeddings=false",
    "b=2",
    f"s={LENGTH}",
)
LAYER = 2 * HIDDEN + 4 * HIDDEN**2 + 3 * FFN * HIDDEN  # two norms; q, k, v, o; gate, up, down
ELEMENTS = 2 * VOCAB * HIDDEN + HIDDEN + LAYERS * LAYER  # embedding, LM head, final norm
L2_BYTES = 50 * 2**20  # of an H100


def small(*words: str, gpu: str = "h100-80gb") -> Spec:
    return memcalc.load("llama-3.2-1b", *SIZES, *LOCAL, *words, gpu=gpu)


def allocations(spec: Spec, phase: str = "") -> list[tuple[int, int]]:
    """Return the stream and the bytes of each allocation, of one phase or of all."""
    script = [each for part in run_requests(spec).stretches if phase in ("", part.phase) for each in part.script]
    return [(each >> STREAM_SHIFT, each & (1 << STREAM_SHIFT) - 1) for each in script if each > 0]


def parameters(*elements: int) -> list[LocalParameter]:
    return [LocalParameter(f"m{n}", "weight", (("n", each), ("1", 1)), 1, "layer") for n, each in enumerate(elements)]


# -- buffers -----------------------------------------------------------------------------------------------------------


def test_the_buffer_has_the_last_parameter_first() -> None:
    """Of 100, 200 and 300 elements: 300 from 0, 200 from 320, 100 from 576 to 676; padded to 768, 384 for each rank."""
    ordered = parameters(100, 200, 300)
    first, second = (rank_parts(ordered, 2, rank) for rank in (0, 1))

    assert buffer_elements(ordered, 2, pads=True) == 768
    assert buffer_elements(ordered, 1, pads=False) == 600
    assert [(held.module, part) for held, part in first] == [("m2", 300), ("m1", 64)]
    assert [(held.module, part) for held, part in second] == [("m1", 136), ("m0", 100)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 24])
def test_the_parts_of_all_ranks_are_the_parameters(ranks: int) -> None:
    ordered = parameters(7, 1000, 64, 12345, 3)
    parts = [part for rank in range(ranks) for _, part in rank_parts(ordered, ranks, rank)]

    assert sum(parts) == 7 + 1000 + 64 + 12345 + 3
    assert buffer_elements(ordered, ranks, pads=True) % ranks == 0


@pytest.mark.parametrize(
    ("words", "buffers"),
    [
        ((), [4 * ELEMENTS]),  # fp32 main gradients
        (("dtype=fp16", "gradient_dtype=fp16"), [2 * ELEMENTS]),
        (("data_parallel=2", "zero_stage=1"), [2 * ELEMENTS, 4 * ELEMENTS]),  # weights, too; all multiples of 128
        (("data_parallel=2",), [4 * ELEMENTS]),
        (("dtype=fp32", "recipe=fp32-main", "data_parallel=2", "zero_stage=1"), [4 * ELEMENTS, 4 * ELEMENTS]),
    ],
)
def test_buffers_are_allocated_on_a_stream_of_their_own(words: tuple[str, ...], buffers: list[int]) -> None:
    assert [size for stream, size in allocations(small(*words)) if stream == BUFFER_STREAM] == buffers


def test_main_parameters_are_cloned_then_cast() -> None:
    """Weights with decay first, then the norms: a clone in bf16 and the fp32 copy of each."""
    sizes = [size for stream, size in allocations(small(), "optimizer") if stream != BUFFER_STREAM]
    pairs = list(zip(sizes[::2], sizes[1::2], strict=True))

    assert all(main == 2 * clone for clone, main in pairs)
    assert sum(main for _, main in pairs) == 4 * ELEMENTS
    assert pairs[0] == (2 * VOCAB * HIDDEN, 4 * VOCAB * HIDDEN)
    assert [clone for clone, _ in pairs[-5:]] == [2 * HIDDEN] * 5  # two norms of each layer, the final norm


def test_fp16_gradients_are_cast_in_the_step_until_the_next_forward() -> None:
    """Source: core/optimizer/optimizer.py, _copy_model_grads_to_main_grads and zero_grad."""
    spec = small("dtype=fp16", "gradient_dtype=fp16")
    requests = Requests()
    SimulatedRun(spec, requests).play()
    alive: dict[int, int] = {}
    ends: dict[str, int] = {}
    made = 0
    for stretch in requests.stretches:
        for each in stretch.script:
            if each >= 0:
                alive[made] = each & (1 << STREAM_SHIFT) - 1
                made += 1
            else:
                del alive[~each]
        ends[stretch.phase] = sum(alive.values())

    # The step has also created both moments of Adam.
    assert ends["optimizer_step_1"] - ends["backward_1"] == (4 + 8) * ELEMENTS
    assert ends["optimizer_step_1"] == ends["zero_grad_2"] == ends["optimizer_step_2"]
    assert ends["forward_2"] < ends["zero_grad_2"]


# -- first runs --------------------------------------------------------------------------------------------------------


def test_each_compiled_kernel_is_tried_once() -> None:
    """With dropout: the sum of the residual stream and the activation, each forward and backward."""
    trials = [phase for phase in ("forward_1", "backward_1") for _, size in allocations(small("dropout=0.1"), phase)
              if size == L2_BYTES]  # fmt: skip

    assert trials == ["forward_1", "forward_1", "backward_1", "backward_1"]
    assert sum(size == L2_BYTES for _, size in allocations(small("dropout=0.1"))) == len(trials)


def test_the_input_of_score_matmuls_is_allocated_once() -> None:
    """Before the first layer's scores, b·h·s² elements in bf16: equal to them, which each layer allocates."""
    scores = 2 * 2 * 8 * LENGTH**2
    first, second = ([size for _, size in allocations(small(), f"forward_{step}")].count(scores) for step in (1, 2))

    assert first == second // 2 + 1  # `forward_2` stands for two steps


@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_buffers_allocated_once_are_rows_alone(attention: str) -> None:
    """They are no part of the recorded passes: a first backward without accumulation has no second cuBLAS workspace."""
    words = (*SIZES, *LOCAL, f"attention={attention}")
    alone, accumulated = (
        memcalc.estimate("llama-3.2-1b", *words, f"gradient_accumulation_steps={steps}", gpu="h100-80gb").ledger.totals
        for steps in (1, 2)
    )

    assert alone["backward_1"] <= accumulated["backward_1"]


def test_recomputed_layers_hold_their_result_until_their_backward_returns() -> None:
    """CheckpointFunction.backward: the result and the gradient that it was given, two hidden states."""
    spec = small("recompute=full", "dropout=0.0")
    blocks = SimulatedRun(spec, Requests())
    blocks.play()
    assert blocks.passing is not None
    parts = blocks.passing.passing.parts
    program = parts.blocks[parts.block_of(0, again=True)].program
    names = [(event.sign, program.storages[event.storage].name) for event in program.backward]
    hidden = program.storages[program.output].name

    assert names.index((-1, hidden)) > names.index((-1, "attention.qkv_proj.weight"))


def test_the_model_references_the_newest_input_of_a_stage_until_the_next_step() -> None:
    """After a step: the input that the last stage has received, and its gradient (set_input_tensor)."""
    spec = small("pipeline_parallel=2", "gradient_accumulation_steps=2")
    first, last = (MegatronPipeline(spec, Requests(), stage) for stage in stages_of(spec))
    first.play()
    last.play()

    assert {name: len(storages) for name, storages in last.variables.items() if storages} == {MODEL: 2}
    assert not any(first.variables.values())


# -- ranks and limits --------------------------------------------------------------------------------------------------


def test_ranks_of_the_distributed_optimizer_are_replayed() -> None:
    assert ranks_to_replay(small("data_parallel=3")) == (None,)
    assert ranks_to_replay(small("data_parallel=3", "zero_stage=1")) == (None, 1, 2)
    assert len(ranks_to_replay(small("data_parallel=64", "zero_stage=1"))) == SAMPLED_RANKS + 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("attention=flash",), "Transformer Engine's modules"),
        (
            ("pipeline_parallel=2", "gradient_accumulation_steps=2", "schedule=gpipe"),
            "Megatron-Core's schedule gpipe",
        ),
        (("pipeline_parallel=2",), "fewer micro-batches than Megatron-Core's stages"),
        (
            ("pipeline_parallel=2", "gradient_accumulation_steps=2", "tie_word_embeddings=true", "zero_stage=1")
            + ("data_parallel=2",),
            "a tied embedding's shards over Megatron-Core's stages",
        ),
        (("context_parallel=2", "attention=flash"), "Transformer Engine's modules"),
        (("tensor_parallel=2", "sequence_parallel=true"), "Megatron-Core's sequence parallelism"),
        (("recompute=[[0,1]]",), "a checkpoint of several layers of Megatron-Core"),
        (("optimizer=sgd",), "optimizer sgd of Megatron-Core"),
        (
            ("implementation=plain", "loss=materialized", "engine=megatron", "data_parallel=2"),
            "Megatron-LM's buffers around other modules",
        ),
    ],
)
def test_what_is_not_replayed_says_why(words: tuple[str, ...], reason: str) -> None:
    assert unsupported_reason(small(*words)) == f"the order of requests is not known with {reason}"


# -- recorded programs -------------------------------------------------------------------------------------------------

PROGRAMS = [
    record
    for path in sorted(Path(RECORDINGS).glob("*/megatron.jsonl"))
    for record in read_records(path)
    if record["good"]
]


def specification(record: Mapping[str, Any]) -> Spec:
    with TemporaryDirectory() as folder:
        write_files(record, folder)
        return load(Path(folder, "train.sh"), settings(record, named=True), gpu=record["card"])


@pytest.mark.parametrize("record", quick_every(3, PROGRAMS), ids=lambda record: f"{record['seed']}-{record['number']}")
def test_recorded_programs_reserve_as_replayed(record: Mapping[str, Any]) -> None:
    """Real Megatron-LM on the null CUDA device, byte-exact: each rank by its stage and its place among the replicas.

    Ranks are numbered in the order tensor, data, pipeline (core/parallel_state.py, order "tp-cp-ep-dp-pp").
    """
    spec = specification(record)
    parallelism = spec.parallelism
    tensor, replicas = parallelism.tensor_parallel, parallelism.data_parallel
    expected = [
        simulate(spec, stage=stage, rank=replica if parallelism.zero_stage else None).reserved_bytes
        for stage in stages_of(spec)
        for replica in range(replicas)
        for _ in range(tensor)
    ]

    assert [rank["rank"] for rank in record["ranks"]] == [*range(len(expected))]
    assert [rank["reserved_bytes"] for rank in record["ranks"]] == expected
