"""axolotl's autograd functions for layers with adapters: what they save, and which modules they replace."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.ledger.component import Component

B, S, D, F, R, KV, LAYERS = 2, 1024, 2048, 8192, 16, 512, 4
TOKENS = B * S
RUN = (
    *("llama-3.2-1b", "implementation=huggingface", "finetune=lora", "recipe=amp", "lora.base_dtype=compute"),
    *("lora.input_require_grads=true", f"b={B}", f"s={S}", f"lora.rank={R}", f"num_layers={LAYERS}"),
)


def saved(parts: str, dropout: float) -> int:
    """Return the bytes that one layer saves less with these functions than with PEFT's modules."""
    kept = [
        memcalc.estimate(*RUN, f"lora.dropout={dropout}", f"lora.fused={each}").ledger.components("loss_1")
        for each in ("[]", parts)
    ]
    without, fused = (found[Component.ACTIVATIONS] for found in kept)
    return int(without - fused) // LAYERS


def of_peft(width: int, dropout: float) -> int:
    """Of an adapter: the input, cast to bf16 from fp32, and A's output; with dropout a mask of one byte per element."""
    return TOKENS * (2 * (width + R) + (width if dropout else 0))


def of_function(width: int, dropout: float) -> int:
    """Of a function: with dropout, the input after it and a mask. The input itself is counted where it is needed."""
    return TOKENS * (2 * width + width if dropout else 0)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_function_of_an_mlp_saves_its_input_gate_up_and_casts_of_the_adapters(dropout: float) -> None:
    """Both save gate and up, PEFT's modules also silu(gate), and the product of both as the last layer's input."""
    peft = 2 * of_peft(D, dropout) + of_peft(F, dropout) + 2 * TOKENS * F
    function = 2 * TOKENS * D + of_function(D, dropout) + 2 * 3 * R * (D + F)

    assert saved("[mlp]", dropout) == peft - function


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_function_of_q_k_and_v_saves_its_input_once(dropout: float) -> None:
    peft = 3 * of_peft(D, dropout)
    function = 2 * TOKENS * D + of_function(D, dropout) + 2 * R * (3 * D + D + 2 * KV)

    assert saved("[qkv]", dropout) == peft - function


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_function_of_the_output_saves_what_attention_saves(dropout: float) -> None:
    """Its input is attention's output, which flash attention saves as well."""
    assert saved("[o]", dropout) == of_peft(D, dropout) - of_function(D, dropout) - 2 * R * (D + D)


def test_a_function_needs_adapters_on_all_its_layers() -> None:
    some = (*RUN, "lora.target_modules=[q_proj, v_proj]")

    assert (
        memcalc.estimate(*some, "lora.fused=[qkv,o,mlp]").ledger.peak_bytes == memcalc.estimate(*some).ledger.peak_bytes
    )


@pytest.mark.parametrize("other", [("gpt2", "implementation=huggingface"), ("llama-3.2-1b", "implementation=plain")])
def test_other_modules_have_no_such_functions(other: tuple[str, str]) -> None:
    with pytest.raises(InputError, match=r"lora.fused replaces transformers' modules of .*qwen3") as caught:
        memcalc.load(*other, "finetune=lora", "lora.fused=[mlp]")

    assert "lora.fused: []" in (caught.value.remedy or "")


def test_a_function_does_not_gather_sharded_weights() -> None:
    run = ("llama-3.2-1b", "implementation=huggingface", "finetune=lora", "data_parallel=2", "lora.fused=[mlp]")
    memcalc.load(*run, "zero_stage=2")

    with pytest.raises(InputError, match=r"lora.fused is not modelled with zero_stage = 3"):
        memcalc.load(*run, "zero_stage=3")


def test_flash_attention_of_packed_samples_saves_keys_and_values_for_every_query_head() -> None:
    run = ("llama-3.2-1b", "implementation=huggingface", f"b={B}", f"s={S}", f"num_layers={LAYERS}")
    kept = [
        memcalc.estimate(*run, f"repeat_kv={each}").ledger.components("loss_1")[Component.ACTIVATIONS]
        for each in ("true", "false")
    ]

    # flash attention saves keys; the copy of values replaces what it would save, the output of v_proj
    assert kept[0] - kept[1] == LAYERS * 2 * TOKENS * 2 * (D - KV)


def test_few_of_transformers_modules_repeat_heads() -> None:
    with pytest.raises(InputError, match=r"repeat_kv = true with implementation = huggingface is modelled for .*qwen3"):
        memcalc.load("gpt2", "implementation=huggingface", "repeat_kv=true")


def test_modules_are_cast_to_fp32_while_a_4_bit_model_is_loaded() -> None:
    """At the peak both matrices of V·d are in fp32 and one of them in bf16; adapters do not exist yet."""
    run = ("qwen2.5-7b", "implementation=huggingface", "finetune=qlora", "recompute=full", "s=512", "lora.rank=8")
    found = memcalc.estimate(*run, "lora.fp32_on_load=[embed_tokens,lm_head]").ledger
    table = 152064 * 3584
    (casts,) = [row for row in found.rows if row.tensor == "weights in fp32 and back"]
    adapters = [row for row in found.rows if row.component is Component.WEIGHTS and ".lora_" in row.module]
    trained = sum(row.bytes for row in adapters)

    assert found.peak_phase == "model"
    assert casts.bytes == (4 - 2) * 2 * table + 2 * table - trained
