"""LoRA with a base sharded across ranks: what a rank holds, gathers and reduces."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.layout.stages import stages_of
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.programs.sized_program import run_sizer
from memcalc.simulation.recorded_step import ChunkPasses

D, KV, F, V, RANK, LAYERS = 2048, 512, 8192, 4096, 16, 2
# q, k, v, o, gate, up, down and two norms
BASE = 2 * D * D + 2 * D * KV + 3 * D * F + 2 * D
# r (in + out) beside each of the seven matrices
ADAPTERS = RANK * (2 * (D + D) + 2 * (D + KV) + 3 * (D + F))

RUN = ("llama-3.2-1b", f"num_layers={LAYERS}", f"vocab_size={V}", "b=1", "s=64", "finetune=lora", f"lora.rank={RANK}")
FSDP2 = (*RUN, "recipe=pure", "engine=fsdp2", "zero_stage=3", "data_parallel=8")
DEEPSPEED = (*RUN, "recipe=mixed-16", "engine=deepspeed", "data_parallel=8")


def estimated(*words: str) -> Ledger:
    return memcalc.estimate(*words).ledger


def buffers(ledger: Ledger, phase: str) -> dict[str, int]:
    return {row.tensor: row.bytes for row in ledger.rows if row.module == "engine" and phase in row.phases}


def test_fsdp2_shards_base_and_adapters() -> None:
    """bf16 weights of the base, fp32 adapters (PEFT's autocast_adapter_dtype), an eighth of each."""
    held = estimated(*FSDP2).components("optimizer_step_2")

    assert held[Component.WEIGHTS] == (2 * (LAYERS * BASE + V * D + D) + 4 * LAYERS * ADAPTERS) // 8
    assert held[Component.GRADIENTS] == 4 * LAYERS * ADAPTERS // 8
    assert held[Component.OPTIMIZER_STATE] >= 8 * LAYERS * ADAPTERS // 8


def test_a_layer_is_gathered_in_bytes_where_dtypes_differ() -> None:
    assert buffers(estimated(*FSDP2), "backward_2")["layer parameters, gathered"] == 2 * BASE + 4 * ADAPTERS
    one = estimated(*FSDP2, "lora.adapter_dtype=compute")
    assert buffers(one, "backward_2")["layer parameters, gathered"] == 2 * (BASE + ADAPTERS)


def test_only_what_trains_is_reduced() -> None:
    """A layer's adapters in fp32; the root, embedding, last norm and head, has nothing to reduce."""
    spec = memcalc.load(*FSDP2)
    stage = stages_of(spec)[0]
    stream = ChunkPasses(spec, stage, lambda run: run_sizer(run, None)).step(stage, exist=False).stream
    named = [(getattr(kind.label, "tensor", ""), kind.requested) for kind in stream.made]
    scattered = [(name, size) for name, size in named if "scatter" in name]

    assert scattered == [("reduce-scatter input of a layer", 4 * ADAPTERS)] * LAYERS


def test_rows_of_few_ranks_are_padded() -> None:
    """A has 16 rows, of 64 ranks each has room for one: four times its elements are gathered. The router's B divides."""
    ledger = estimated(*FSDP2, "data_parallel=64")
    lora_a = RANK * (3 * D + D + 2 * D + F)  # q, k, v; o; gate, up; down
    assert buffers(ledger, "backward_2")["layer parameters, gathered"] == 2 * BASE + 4 * (ADAPTERS + 3 * lora_a)


@pytest.mark.parametrize("stage", [1, 2])
def test_below_stage_3_the_base_is_whole_and_only_adapters_have_masters(stage: int) -> None:
    held = estimated(*DEEPSPEED, f"zero_stage={stage}").components("optimizer_step_2")

    assert held[Component.WEIGHTS] == 2 * (LAYERS * (BASE + ADAPTERS) + V * D + D)
    assert held[Component.MASTER_WEIGHTS] == 4 * LAYERS * ADAPTERS // 8


def test_construction_flattens_what_trains_alone() -> None:
    """Nothing of the base is in a group of the optimizer's, so the base is there once, and never twice."""
    ledger = estimated(*DEEPSPEED, "zero_stage=2")
    assert ledger.totals["optimizer"] < 2 * (LAYERS * (BASE + 3 * ADAPTERS) + V * D + D)


def test_stage_3_keeps_inputs_of_frozen_layers() -> None:
    """DeepSpeed's own linear function saves its input, which nothing needs: with adapters on q and v alone, those of o
    (attention's output, which flash attention keeps), gate and up (one tensor) and down, and the head's."""
    words = ("s=64", "lora.target_modules=[q_proj,v_proj]")
    whole, shared = (estimated(*DEEPSPEED, *words, f"zero_stage={stage}") for stage in (2, 3))
    tokens = 64
    down = F * tokens  # silu(gate) * up: its factors are kept, and it is not

    more = shared.components("loss_2")[Component.ACTIVATIONS] - whole.components("loss_2")[Component.ACTIVATIONS]
    assert more == 2 * LAYERS * (D * tokens + down)


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_a_base_in_4_bits_is_split_and_its_scales_are_not(engine: str) -> None:
    """Four elements to each bf16 number; a scale in 8 bits for 64 elements, another in fp32 for 256 of these, a mean,
    and tables of 16 and 256 fp32 numbers, of each of seven matrices."""
    recipe = "pure" if engine == "fsdp2" else "mixed-16"
    words = (*RUN, f"recipe={recipe}", f"engine={engine}", "zero_stage=3", "data_parallel=8", "finetune=qlora")
    ledger = estimated(*words, "lora.adapter_dtype=compute")
    matrices = BASE - 2 * D
    scales = matrices // 64 + 4 * (matrices // 64 // 256) + 7 * 4 * (1 + 16 + 256)

    held = ledger.components("optimizer_step_2")[Component.WEIGHTS]
    split = LAYERS * (matrices // 2 + 2 * 2 * D + 2 * ADAPTERS) + 2 * (V * D + D)
    assert held == split // 8 + LAYERS * scales


CASES = (
    "recipe=pure",
    "recipe=pure zero_stage=2",
    "recipe=amp",
    "recipe=pure recompute=full s=2048",
    "recipe=pure data_parallel=64",
    "recipe=pure implementation=huggingface",
    "recipe=pure gradient_accumulation_steps=3 gradient_clipping=1",
    "recipe=pure lora.modules_to_save=[lm_head] tie_word_embeddings=false",
    "recipe=pure data_parallel=16 data_parallel_replicate=2",
    "recipe=pure offload=all",
    "recipe=pure lora.target_modules=[q_proj,v_proj] lora.dropout=0.05",
)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_backward_and_update_are_those_of_the_traced_step(case: str) -> None:
    """To the byte asked for; a forward of 64 tokens, in which what is gathered is most, within 0.1 %."""
    words = (*FSDP2, *case.split())
    estimated, traced = memcalc.estimate(*words).ledger, memcalc.trace(*words, steps=2).ledger

    for phase in ("zero_grad_2", "forward_2", "backward_2", "optimizer_step_2"):
        asked = [
            each.totals[phase] - each.components(phase).get(Component.BLOCK_ROUNDING, 0) for each in (estimated, traced)
        ]
        assert asked[0] == pytest.approx(asked[1], rel=1e-3 if phase == "forward_2" else 0), phase
