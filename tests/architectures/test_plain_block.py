"""What the plain block keeps for backward, against the papers' closed forms, to the byte.

The papers neglect what the ledger does not: each LayerNorm keeps a mean and a reciprocal deviation in fp32 for every
token (2 · 4 bytes), each RMSNorm only the latter (4 bytes), fused attention a log-sum-exp for every head (4 bytes).
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.ledger.textbook import activation_bytes, tensor_parallel_layer_bytes

SIZES: dict[str, object] = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
LLAMA: dict[str, object] = {"architecture": "llama", "num_key_value_heads": 2, "intermediate_size": 96}
B, S, D, H, L = 2, 32, 64, 4, 3
BSD = B * S * D  # 4096
MAP = B * H * S * S  # 8192, elements of one attention map
STATISTIC = 4 * B * S  # 256 bytes: one fp32 number for each token


def ledger(*overrides: str, model: dict[str, object] | None = None, **training: Any) -> Ledger:
    run = {
        "model": SIZES | (model or {}),
        "training": {"b": B, "s": S, "attention": "eager", "dropout": 0.1, "recipe": "pure"} | training,
    }
    return memcalc.estimate(run, *overrides).ledger


def activations(*overrides: str, model: dict[str, object] | None = None, **training: Any) -> int:
    return ledger(*overrides, model=model, **training).components("loss_1")[Component.ACTIVATIONS]


# -- GPT ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("b", [1, 64, 128])
def test_gpt3_keeps_the_papers_activations_and_the_statistics_of_its_norms(b: int) -> None:
    """96 layers · 2 norms · 2 statistics · 4 bytes · b · 2048 tokens = 3 145 728 b beside the 275 414 777 856 b."""
    result = memcalc.estimate("gpt3", f"b={b}")
    statistics = 96 * 2 * 2 * 4 * b * 2048

    held = result.ledger.components("loss_1")[Component.ACTIVATIONS]

    assert result.textbook is not None
    assert held == result.textbook.activation_bytes + statistics == (275_414_777_856 + 3_145_728) * b


def test_one_layer_at_the_size_of_gpt3() -> None:
    """34·2048·12288 + 5·2048²·96 + 2·2·4·2048 = 855 638 016 + 2 013 265 920 + 32 768."""
    one = memcalc.estimate("gpt3", "num_layers=1").ledger

    assert one.components("loss_1")[Component.ACTIVATIONS] == 2_868_936_704


@given(l=st.integers(1, 5), d_h=st.integers(1, 40), h=st.integers(1, 8), b=st.integers(1, 9), s=st.integers(1, 65))
def test_a_gpt_keeps_the_papers_activations_at_any_size(l: int, d_h: int, h: int, b: int, s: int) -> None:  # noqa: E741
    """l (34 b s d + 5 b s² h) + l · 2 norms · 2 statistics · 4 bytes · b · s."""
    model: dict[str, object] = {
        "num_layers": l,
        "hidden_size": h * d_h,
        "num_attention_heads": h,
        "max_position_embeddings": 65,
    }

    assert activations(model=model, b=b, s=s) == activation_bytes(l, h * d_h, h, b, s) + l * 2 * 2 * 4 * b * s


def test_each_byte_of_34_b_s_d_and_5_b_s2_h_has_a_row() -> None:
    """Korthikanti et al. section 4.1: 11 attention, 19 MLP, 4 norms; 2 + 1 + 2 on each element of the maps."""
    kept = {
        row.tensor: row.bytes // L
        for row in ledger(b=1).live_rows("loss_1", Component.ACTIVATIONS)
        if "mean" not in row.tensor and "deviation" not in row.tensor
    }

    assert kept == {
        "layer input": 2 * S * D,  # of the first norm
        "input_norm output": 2 * S * D,  # input of q, k, v
        "attention.qkv_proj output": 6 * S * D,
        "attention probabilities": 2 * H * S * S,
        "attention probabilities dropout mask": H * S * S,
        "attention probabilities dropout output": 2 * H * S * S,
        "attention output by token": 2 * S * D,  # input of the output projection
        "attention dropout mask": S * D,
        "attention sum": 2 * S * D,  # input of the second norm
        "post_attention_norm output": 2 * S * D,  # input of the MLP
        "mlp.up_proj output": 2 * S * 4 * D,  # input of gelu
        "mlp.gelu": 2 * S * 4 * D,  # input of the down projection
        "mlp dropout mask": S * D,
    }


def test_a_dropout_mask_is_one_byte_an_element_in_every_dtype() -> None:
    """In fp32 what is not a mask doubles: 32·2 + 2 = 66 b s d, and 4·2 + 1 = 9 bytes on each element of the maps."""
    fp32 = activations(dtype="fp32", recipe="fp32")
    masks = [row for row in ledger(dtype="fp32", recipe="fp32").rows if row.tensor.endswith("dropout mask")]

    assert fp32 == L * (66 * BSD + 9 * MAP + 4 * STATISTIC)
    assert {(row.tensor, row.dtype, row.bytes // row.count) for row in masks} == {
        ("attention probabilities dropout mask", "bool", MAP),
        ("attention dropout mask", "bool", BSD),
        ("mlp dropout mask", "bool", BSD),
    }


def test_without_dropout_neither_masks_nor_dropped_maps_are_kept() -> None:
    """34 - 2 masks = 32 b s d; of the maps only the softmax's output of 2 bytes."""
    assert activations(dropout=0.0) == L * (32 * BSD + 2 * MAP + 4 * STATISTIC)


def test_relu_keeps_its_output_alone() -> None:
    """The down projection keeps that too, so 34 - 2·4 = 26 b s d."""
    assert activations(model={"mlp": "relu"}) == L * (26 * BSD + 5 * MAP + 4 * STATISTIC)


@pytest.mark.parametrize(
    ("norms", "linear"),
    [
        (2, 32),  # both norms read the layer's input: 34 - 2
        (1, 30),  # and attention and MLP read the same normed tensor: 34 - 2 - 2
    ],
)
def test_a_parallel_block_shares_its_input(norms: int, linear: int) -> None:
    model: dict[str, object] = {"parallel_block": True, "norms_per_layer": norms}

    assert activations(model=model) == L * (linear * BSD + 5 * MAP + 2 * norms * STATISTIC)


# -- tensor and sequence parallelism -----------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [2, 8, 32])
@pytest.mark.parametrize("selective", [False, True])
def test_tensor_parallel_gpt3_holds_table_2_of_korthikanti(t: int, selective: bool) -> None:
    """s b d (10 + 24/t + 5hs/(dt)), without the maps when the core is recomputed; statistics are on every rank."""
    overrides = [f"tensor_parallel={t}", f"recompute={'selective' if selective else 'none'}"]
    maps = 0 if selective else 5 * 96 * 2048**2 // t
    layer = 10 * 2048 * 12288 + 24 * 2048 * 12288 // t + maps

    held = memcalc.estimate("gpt3", *overrides).ledger.components("loss_1")[Component.ACTIVATIONS]

    assert layer == tensor_parallel_layer_bytes(12288, 96, 1, 2048, t, sequence=False, selective=selective)
    assert held == 96 * (layer + 2 * 2 * 4 * 2048)


@pytest.mark.parametrize("t", [2, 8, 32])
@pytest.mark.parametrize("selective", [False, True])
def test_sequence_parallel_gpt3_holds_a_t_th_of_everything(t: int, selective: bool) -> None:
    """s b d/t (34 + 5hs/d), 34 s b d/t when the core is recomputed; and a t-th of the statistics."""
    overrides = [
        f"tensor_parallel={t}",
        "sequence_parallel=true",
        "engine=deepspeed",
        f"recompute={'selective' if selective else 'none'}",
    ]
    layer = 34 * 2048 * 12288 // t + (0 if selective else 5 * 96 * 2048**2 // t)

    held = memcalc.estimate("gpt3", *overrides).ledger.components("loss_1")[Component.ACTIVATIONS]

    assert layer == tensor_parallel_layer_bytes(12288, 96, 1, 2048, t, sequence=True, selective=selective)
    assert held == 96 * (layer + 2 * 2 * 4 * 2048 // t)


def test_sequence_parallelism_gathers_the_sequence_in_buffers_that_are_not_kept() -> None:
    """The whole input of the MLP, 2 b s d, exists in backward beside the kept share of 2 b s/t d."""
    split = ledger("tensor_parallel=2", "sequence_parallel=true", "engine=deepspeed")
    buffers = (row for row in split.rows if row.component is Component.COMMUNICATION_BUFFERS)
    gathered = [row for row in buffers if row.module != "engine"]  # which reduces gradients

    assert gathered
    assert {row.bytes for row in gathered} == {2 * BSD}
    assert all("loss_1" not in row.phases for row in gathered)


# -- recomputation -----------------------------------------------------------------------------------------------------


def test_selective_recomputation_drops_the_maps_and_what_they_are_made_of() -> None:
    """34 b s d + statistics, with q, k, v kept once as the output of their projection."""
    assert activations(recompute="selective") == L * (34 * BSD + 4 * STATISTIC)


def test_full_recomputation_keeps_the_input_of_each_layer() -> None:
    """2 b s d a layer, and no statistics."""
    assert activations(recompute="full") == L * 2 * BSD


@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        ("every-1", 3),
        ("every-2", 1),  # layer 1 of 0, 1, 2
        ("every-3", 1),  # layer 2
        ("every-4", 0),
        ([0, 2], 2),
        ([1], 1),
    ],
)
def test_a_plan_recomputes_the_layers_it_names(recompute: object, again: int) -> None:
    """2 b s d for a recomputed layer, 34 b s d + 5 b s² h + statistics for a kept one."""
    kept = 34 * BSD + 5 * MAP + 4 * STATISTIC

    assert activations(recompute=recompute) == again * 2 * BSD + (L - again) * kept


def test_a_recomputed_layer_is_whole_again_in_its_own_backward() -> None:
    """One layer's maps exist once in backward, where without recomputation the last layer finds those of all three."""
    for plan, layers in (("none", 3), ("full", 1)):
        run = ledger("vocab_size=8", recompute=plan, s=64)  # the maps outweigh all else in backward
        maps = [row for row in run.live_rows("backward_1") if row.tensor == "attention probabilities"]

        assert [row.count for row in maps] == [layers]


# -- fused attention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dropout", "linear"), [(0.1, 34), (0.0, 32)])
def test_flash_attention_keeps_one_number_a_head_and_token_in_place_of_the_maps(dropout: float, linear: int) -> None:
    """34 b s d (32 without the two hidden masks) + 4 b h s of log-sum-exps + statistics."""
    assert activations(attention="flash", dropout=dropout) == L * (linear * BSD + 4 * B * H * S + 4 * STATISTIC)


def test_memory_efficient_attention_rounds_its_rows_up_to_32() -> None:
    """s = 40 tokens have log-sum-exps for 64: 34 b·40·d + 4 b h·64 + 4 statistics of 4 b·40."""
    assert activations(attention="memory-efficient", s=40) == L * (34 * B * 40 * D + 4 * B * H * 64 + 16 * B * 40)


# -- LLaMA -------------------------------------------------------------------------------------------------------------


def test_llama_with_flash_attention_keeps_12_and_4g_and_8f() -> None:
    """g = 2/4 key/value heads a query head, f = 96/64.

    Bytes for each b s d: norm 1 in 2, normed 2, rotated q 2, rotated k and v 4g, attention out 2, norm 2 in 2, normed
    2; gate 2f, up 2f, silu(gate) 2f, their product 2f: the unfused SwiGLU keeps 8f where a fused one keeps 6f.
    4096·(12 + 4·1/2 + 8·3/2) = 4096·26; an RMSNorm keeps one statistic; log-sum-exps 4 b h s.
    """
    kv, inner = B * S * D // 2, B * S * 96
    layer = 12 * BSD + 4 * kv + 8 * inner + 2 * STATISTIC + 4 * B * H * S

    assert activations(model=LLAMA, attention="flash", dropout=0.0) == L * layer
    assert 12 * BSD + 4 * kv + 8 * inner == 26 * BSD


def test_eager_llama_keeps_keys_and_values_for_every_query_head() -> None:
    """4g becomes 4 as grouped heads are repeated, and the softmax's output of 2 bytes is kept."""
    inner = B * S * 96

    assert activations(model=LLAMA, dropout=0.0) == L * (16 * BSD + 8 * inner + 2 * MAP + 2 * STATISTIC)


def test_norms_of_queries_and_keys_keep_their_inputs() -> None:
    """Beside rotated q 2 and k 2g, the whole projection 2 + 4g; a statistic for each of the h + h_kv heads.

    Qwen3 with h·d_h = d: 2 + 2 + (2 + 4g) + 2 + 2g + 2 + 2 + 2 = 14 + 6g, g = 1/2; v is a view of the projection.
    """
    qwen3: dict[str, object] = LLAMA | {"architecture": "qwen3", "head_dim": 16}
    kv, inner = B * S * D // 2, B * S * 96
    layer = 14 * BSD + 6 * kv + 8 * inner + (2 + H + 2) * STATISTIC + 4 * B * H * S

    assert activations(model=qwen3, attention="flash", dropout=0.0) == L * layer


def test_llama_3_70b_in_bytes_a_layer() -> None:
    """g = 1/8, f = 3.5: 12 + 1/2 + 28 = 40.5 b s d of d = 8192 and s = 2048, + 2·4·s + 4·64·s."""
    run = memcalc.estimate("llama-3-70b", "s=2048", "attention=flash", "dropout=0")
    layer = 81 * 2048 * 8192 // 2 + 2 * 4 * 2048 + 4 * 64 * 2048

    assert layer == 680_017_920
    assert run.ledger.components("loss_1")[Component.ACTIVATIONS] == 80 * layer


# -- loss --------------------------------------------------------------------------------------------------------------


def logits_alive(run: Ledger, phase: str) -> dict[str, int]:
    """Return live bytes per logit, of tensors with the shape of the logits."""
    return {row.tensor: row.bytes // (4 * 64 * 50257) for row in run.live_rows(phase) if row.shape == (4, 64, 50257)}


def large_vocabulary() -> Ledger:
    """So many logits that the loss's own backward is the peak of backward."""
    return ledger("vocab_size=50257", "num_layers=1", b=4, s=64)


def test_a_logit_costs_10_bytes_in_the_loss() -> None:
    """The model's output, its fp32 copy, which goes as the loss returns, and what the loss keeps."""
    assert logits_alive(large_vocabulary(), "loss_1") == {
        "lm_head output": 2,
        "logits in fp32": 4,
        "log-probabilities": 4,
    }


def test_a_logit_costs_14_bytes_in_the_backward_of_the_loss() -> None:
    """Two gradients in fp32 beside the log-probabilities they need; the caller still holds the model's output."""
    assert logits_alive(large_vocabulary(), "backward_1") == {
        "lm_head output": 2,
        "log-probabilities": 4,
        "gradient of log-probabilities": 4,  # of the mean over the labels' rows (nll_loss)
        "gradient of logits in fp32": 4,  # of log_softmax
    }


def test_logits_and_loss_hold_the_heads_input_its_norm_and_the_logits() -> None:
    """14 bytes for each of b s V, 4 for each of b s d (norm in and out), 2 statistics, and the loss itself."""
    tokens = 4 * 64

    assert large_vocabulary().components("backward_1")[Component.LOGITS_AND_LOSS] == (
        14 * tokens * 50257 + 4 * tokens * 64 + 2 * 4 * tokens + 4
    )


# -- sums --------------------------------------------------------------------------------------------------------------


RUNS = {
    "gpt": (),
    "llama, flash": ("architecture=llama", "num_key_value_heads=2", "attention=flash"),
    "recomputed": ("recompute=every-2",),
    "accumulating": ("gradient_accumulation_steps=4", "recipe=mixed-20"),
    "amp": ("recipe=amp",),
    "pipeline": ("pipeline_parallel=3", "gradient_accumulation_steps=4"),
    "tensor and sequence": ("tensor_parallel=2", "sequence_parallel=true"),
    "sharded": ("data_parallel=8", "zero_stage=3", "recipe=mixed-16"),
}


@pytest.mark.parametrize("name", RUNS)
def test_rows_sum_to_phases_and_components_to_the_peak(name: str) -> None:
    for rank in memcalc.estimate({"model": SIZES, "training": {"s": S}}, *RUNS[name]).ranks:
        run = rank.ledger
        for phase in run.phases:
            assert run.totals[phase] == sum(row.bytes for row in run.rows if phase in row.phases)
            assert run.totals[phase] == sum(run.components(phase).values())
        assert run.peak_bytes == max(run.totals.values()) == sum(run.components(run.peak_phase).values())


@pytest.mark.parametrize("name", RUNS)
def test_every_row_is_count_times_its_shape_or_its_rule(name: str) -> None:
    """Where a row's shape is one of tensor axes, count · elements · item size is its bytes."""
    sizes = {"fp32": 4, "bf16": 2, "bool": 1, "int64": 8, "uint8": 1}
    rows = memcalc.estimate({"model": SIZES, "training": {"s": S}}, *RUNS[name]).ledger.rows

    for row in rows:
        elements = 1
        for size in row.shape:
            elements *= size
        assert row.bytes == row.count * elements * sizes[row.dtype], row
