"""Megatron-Core's layers and engine, term by term."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc.api import estimate, load
from memcalc.layout.local_parameters import stage_parameters
from memcalc.layout.stages import stages_of
from memcalc.ledger.component import Component
from memcalc.ledger.result import Result
from memcalc.states.megatron_grad_buffer import buffer_sizes, shard_sizes

L, D, H, KV, F, V, S = 2, 512, 8, 2, 1536, 1000, 256
HEAD = D // H

LLAMA: dict[str, Any] = {
    "l": L,
    "d": D,
    "h": H,
    "num_key_value_heads": KV,
    "intermediate_size": F,
    "V": V,
    "position_embedding": "rope",
    "normalization": "rmsnorm",
    "mlp": "swiglu",
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


def run(training: dict[str, Any] | None = None, **parallelism: Any) -> Result:
    config = {
        "model": LLAMA,
        "training": {"implementation": "megatron", "s": S, "loss": "fused"} | (training or {}),
        "parallelism": parallelism,
    }
    return estimate(config)


def kept(result: Result) -> int:
    """Bytes of activations that the layers keep for backward."""
    return sum(
        row.bytes
        for row in result.ledger.rows
        if row.component is Component.ACTIVATIONS and row.module.startswith("layers") and "loss_1" in row.phases
    )


@pytest.mark.parametrize("t", [1, 2])
def test_a_llama_layer_keeps_the_twelve_four_g_six_f(t: int) -> None:
    """s·b·d/t·(12 + 4g + 6f), g = h_kv/h, f = F/d; 4·b·h·s/t of log-sum-exps; two fp32 statistics a token."""
    result = run(tensor_parallel=t, sequence_parallel=t > 1)

    layer = S * D * 12 + S * D * 4 * KV // H + S * F * 6
    statistics = 4 * H * S + 2 * 4 * S
    assert kept(result) * t == L * (layer + statistics)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_own_modules_keep_the_published_five_b_s_squared_h(dropout: float) -> None:
    """2·h·s² of probabilities; with dropout 2·h·s² and a byte more: 5·h·s² (arXiv 2205.05198, section 4.1).

    And q, k, v for each head and attention's output, two norms' inputs and outputs, the MLP's 6·F of a token; cosines
    and sines of q and of k, and the causal mask; two fp32 statistics of a token; with dropout a byte for both sums.
    """
    result = run({"attention": "eager", "dropout": dropout, "loss": "vocab-parallel"})

    scores = (5 if dropout else 2) * H * S * S
    tensors = S * D * (2 * 8 + (2 if dropout else 0)) + S * F * 6
    small = 4 * S * HEAD * 2 + S * S + 2 * 4 * S
    assert kept(result) == L * (scores + tensors + small)


@pytest.mark.parametrize(("t", "elements"), [(1, H * S * S), (2, H // 2 * S * S), (8, S * D)])
def test_own_modules_share_one_buffer_of_scores_and_gathered_tokens(t: int, elements: int) -> None:
    """b·h/t·s², or s·d of a gathered sequence where that is more, in 16 bits."""
    model = LLAMA | {"num_key_value_heads": H}
    training = {"implementation": "megatron", "s": 64 if t == 8 else S, "attention": "eager"}
    parallelism = {"tensor_parallel": t, "sequence_parallel": t > 1}
    result = estimate({"model": model, "training": training, "parallelism": parallelism})

    (buffer,) = (row for row in result.ledger.rows if row.tensor == "buffer of attention scores")
    assert buffer.bytes == 2 * (elements if t < 8 else 64 * D)


def test_states_in_fp32_are_sixteen_bytes_without_masters() -> None:
    """4 of weights, 4 of main gradients, 8 of moments; nothing is copied for the optimizer."""
    result = run({"dtype": "fp32", "loss": "vocab-parallel"})

    held: dict[Component, int] = {}
    for row in result.ledger.rows:
        if "zero_grad_2" in row.phases:
            held[row.component] = held.get(row.component, 0) + row.bytes
    weights = held[Component.WEIGHTS] - 4 * S * HEAD  # the angles of the positions
    assert held[Component.GRADIENTS] == weights
    assert held[Component.OPTIMIZER_STATE] == 2 * weights
    assert Component.MASTER_WEIGHTS not in held


def test_context_parallelism_divides_what_a_layer_keeps() -> None:
    whole = kept(run())

    assert kept(run(context_parallel=4)) * 4 == whole


def test_an_exchange_of_heads_keeps_attentions_output_twice() -> None:
    """2·b·s/c·d more in each layer: attention saves its own output, the projection what has been exchanged."""
    ring = kept(run(context_parallel=4, context_parallel_method="ring"))

    assert kept(run(context_parallel=4, context_parallel_method="all-to-all")) - ring == L * 2 * S // 4 * D


def test_the_vocabulary_is_padded_to_128_for_each_tensor_parallel_rank() -> None:
    """1000 rows: 1024 = 8·128 on one rank and on two (4·256) and on four (2·512), each with its part."""
    for t in (1, 2, 4):
        result = run(tensor_parallel=t)
        table = next(row for row in result.ledger.rows if row.module == "embed_tokens")
        assert table.shape == (1024 // t, D)
    assert result.parameters == load({"model": LLAMA}).model.vocab_size * 2 * D + (result.parameters - 2 * V * D)


def test_weight_gradient_scratch_is_one_tensor_for_each_shape() -> None:
    """q, k, v fused; the output projection; gate and up fused; down; the output layer. Not one a layer."""
    rows = [row for row in run().ledger.rows if row.tensor.startswith("weight-gradient scratch")]

    qkv = (D + 2 * KV * HEAD) * D
    assert sorted(row.bytes for row in rows) == sorted(2 * n for n in (qkv, D * D, 2 * F * D, D * F, 1024 * D))
    assert {row.count for row in rows} == {1}
    assert all("forward_1" not in row.phases and "forward_2" in row.phases for row in rows)


def test_the_fused_loss_needs_no_memory_beside_the_logits() -> None:
    """Transformer Engine's overwrites them with their gradient; Megatron-Core's own makes an fp32 softmax."""

    def of_vocabulary(result: Result) -> int:
        """Bytes in the loss of what is as large as the logits."""
        rows = [row for row in result.ledger.rows if row.module == "head" and row.shape and row.shape[-1] == 1024]
        return sum(row.bytes for row in rows if "loss_2" in row.phases)

    logits = S * 1024
    assert of_vocabulary(run()) == 2 * logits
    assert of_vocabulary(run({"loss": "vocab-parallel"})) == (4 + 2) * logits


def test_the_buffer_starts_parameters_at_64_elements_and_is_cut_anywhere() -> None:
    """The first of N ranks has an equal stretch, in pieces: one for each parameter that it meets."""
    spec = load({"model": LLAMA, "training": {"implementation": "megatron"}, "parallelism": {"zero_stage": 1}})
    parameters = stage_parameters(spec, next(iter(stages_of(spec))))
    elements = sum(held.count * held.elements for held in parameters)

    (buffer,) = buffer_sizes(parameters, "fp32")
    assert buffer == 4 * elements  # every size here is a multiple of 64
    for ranks in (2, 3, 5):
        step = 128 * ranks
        padded = -(-elements // step) * step
        assert sum(shard_sizes(parameters, "fp32", ranks, ranks)) == 4 * padded // ranks


def test_context_parallel_ranks_share_the_distributed_optimizer() -> None:
    """They hold the same weights: N·c ranks share the fp32 copies."""
    alone = run(zero_stage=1, data_parallel=4, context_parallel=1)
    both = run(zero_stage=1, data_parallel=2, context_parallel=2)

    for component in (Component.MASTER_WEIGHTS, Component.OPTIMIZER_STATE):
        phase = "optimizer_step_2"
        assert alone.ledger.components(phase)[component] == both.ledger.components(phase)[component]


def test_a_stage_holds_the_gradients_of_its_neighbors() -> None:
    """Sent: from the second micro-batch on, on every stage but the first. Received: on every stage but the last."""

    def names(accumulation: int) -> list[set[str]]:
        result = run({"gradient_accumulation_steps": accumulation}, pipeline_parallel=2)
        ranks = sorted(result.ranks, key=lambda rank: rank.rank["pipeline_stage"])
        return [{row.tensor for row in rank.ledger.rows if row.tensor.startswith("gradient sent")} for rank in ranks]

    assert names(1) == [set(), set()]
    assert names(2) == [set(), {"gradient sent to the stage before"}]


@pytest.mark.parametrize("modules", [["core_attn"], ["mlp"], ["core_attn", "mlp"]])
def test_selective_recomputation_keeps_less(modules: list[str]) -> None:
    """core_attn: not the output but as its projection's input; mlp: neither gate and up nor their product."""
    recomputed = run({"recompute": "selective", "recompute_modules": modules})
    saved = {"core_attn": 4 * H * S, "mlp": S * F * 6}

    assert kept(run()) - kept(recomputed) == L * sum(saved[module] for module in modules)


@pytest.mark.parametrize("t", [1, 2])
def test_a_gated_layer_may_be_four_times_as_wide_as_the_hidden_state(t: int) -> None:
    """Llama-3.2-1B: gate and up in one matrix of 2·4·d rows."""
    overrides = ("implementation=megatron", "recipe=mixed-18", "loss=vocab-parallel", f"tensor_parallel={t}")
    rows = estimate("llama-3.2-1b", *overrides).ledger.rows
    assert any(row.tensor == "mlp.gate_up_proj output" and row.shape[-1] == 2 * 4 * 2048 // t for row in rows)
