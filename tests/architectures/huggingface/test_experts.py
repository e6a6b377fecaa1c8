"""What transformers' layers of routed experts keep for backward, term by term, in bf16 with flash attention."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.ledger.component import Component

B, S, D, H, L = 2, 32, 64, 4, 3
E, K, F = 4, 2, 96
BS, BSD = B * S, B * S * D
COPIES = K * BS
SIZES: dict[str, object] = {
    "num_layers": L,
    "hidden_size": D,
    "num_attention_heads": H,
    "num_key_value_heads": H,
    "vocab_size": 100,
    "intermediate_size": F,
    "moe": {"num_experts": E, "num_experts_per_token": K, "expert_intermediate_size": F},
}
NORM = (
    4 * BSD,  # its input in fp32
    4 * BS,  # the reciprocal deviation
    2 * BSD,  # normed, for the weight's gradient
    2 * BSD,  # times the weight, of the matrices behind
)
ATTENTION = (
    3 * 2 * BSD,  # q and k, turned, and v
    2 * BSD,  # what attention makes
    4 * B * H * S,  # log-sum-exp
)
EXPERTS = (
    4 * BS * E,  # router probabilities in fp32
    8 * COPIES,  # which experts
    8 * COPIES,  # the order of copies
    8 * COPIES,  # the tokens they come from
    8 * COPIES,  # the order back
    4 * E,  # where groups end
    2 * COPIES * D,  # copies of tokens
    2 * COPIES * 2 * F,  # gate and up
    2 * COPIES * F,  # silu(gate)
    2 * COPIES * F,  # silu(gate) * up
    2 * COPIES * D,  # what experts make
)


def kept_by_a_layer(family: str, attention: str = "flash", **model: object) -> int:
    run = {
        "model": SIZES | model | {"architecture": family},
        "training": {"b": B, "s": S, "recipe": "pure", "implementation": "huggingface", "attention": attention},
    }
    return memcalc.estimate(run).ledger.components("loss_1")[Component.ACTIVATIONS] // L


def test_mixtral_divides_its_weights_in_place_and_leaves_them_in_fp32() -> None:
    weights = (
        4 * COPIES,  # as they were before the division
        4 * BS,  # by which sum
        4 * COPIES,  # by expert, for the gradient of what experts make
    )

    assert kept_by_a_layer("mixtral") == sum((*NORM, *ATTENTION, *NORM, *EXPERTS, *weights))


def test_qwen3_takes_its_weights_as_they_are_in_bf16() -> None:
    turned = (4 * BSD + 4 * BS * H + 2 * BSD) * 2  # of q and k a norm of heads: fp32, deviations, normed
    weights = 2 * COPIES

    assert kept_by_a_layer("qwen3_moe") == sum((*NORM, *ATTENTION, turned, *NORM, *EXPERTS, weights))


def test_qwen2_opens_its_shared_expert_by_a_gate() -> None:
    shared = 80
    terms = (
        3 * 2 * BS * shared,  # gate, silu(gate) and up of the shared expert
        2 * BS * shared,  # silu(gate) * up
        2 * BSD,  # what it makes
        2 * BS,  # the sigmoid of its gate
        2 * COPIES,  # weights as they are in bf16
    )
    moe = {"num_experts": E, "num_experts_per_token": K, "expert_intermediate_size": F}

    kept = kept_by_a_layer("qwen2_moe", moe=moe | {"shared_expert_intermediate_size": shared})

    assert kept == sum((*NORM, *ATTENTION, *NORM, *EXPERTS, *terms))


def test_olmoe_norms_whole_rows_of_queries_and_keys() -> None:
    turned = (4 * BSD + 4 * BS + 2 * BSD) * 2  # of q and k one norm for all heads: fp32, deviations, normed
    weights = 2 * COPIES

    assert kept_by_a_layer("olmoe") == sum((*NORM, *ATTENTION, turned, *NORM, *EXPERTS, weights))


BY_TOKEN = 2 * BSD  # what attention makes of joined heads, token by token
GATHERED = (
    4 * COPIES,  # weights as they were before the division
    4 * BS,  # by which sum
    4 * COPIES,  # by expert, for the gradient of what experts make
)


def test_minimax_gathers_weights_from_scores() -> None:
    turned = (4 * BSD + 4 * BS + 2 * BSD) * 2

    kept = kept_by_a_layer("minimax_m2", head_dim=D // H)

    assert kept == sum((*NORM, *ATTENTION, BY_TOKEN, turned, *NORM, *EXPERTS, *GATHERED))


def test_glm_routes_in_fp32_and_adds_an_expert_that_all_tokens_visit() -> None:
    shared = F
    terms = (
        4 * BSD,  # tokens in fp32; the fp32 copy of the router's weight is a temporary
        3 * 2 * BS * shared,  # gate, silu(gate) and up of the shared expert
        2 * BS * shared,  # silu(gate) * up
    )
    moe = {"num_experts": E, "num_experts_per_token": K, "expert_intermediate_size": F}

    kept = kept_by_a_layer("glm4_moe", moe=moe | {"shared_expert_intermediate_size": shared, "first_dense_layers": 0})

    assert kept == sum((*NORM, *ATTENTION, BY_TOKEN, *NORM, *EXPERTS, *GATHERED, *terms))


def test_adapters_beside_stacked_experts_are_refused_where_no_step_can_be_traced() -> None:
    """PEFT puts those of dense MLPs beside the experts, which are no matrices of their own."""
    moe = {"num_experts": E, "num_experts_per_token": K, "expert_intermediate_size": F, "first_dense_layers": 0}
    run = {
        "model": SIZES | {"architecture": "glm4_moe", "moe": moe | {"shared_expert_intermediate_size": F}},
        "training": {"b": B, "s": S, "recipe": "pure", "implementation": "huggingface", "finetune": "lora"},
        "parallelism": {"engine": "ddp", "data_parallel": 2},
    }

    with pytest.raises(InputError, match="PEFT puts them on the stacked experts"):
        memcalc.estimate(run)


def test_ernie_routes_by_a_weight_that_is_in_fp32_itself() -> None:
    terms = (
        2 * 4 * S * D // H,  # cosines and sines of pairs, in fp32
        4 * BSD,  # tokens in fp32
        4 * COPIES,  # weights before the division
        4 * BS,  # their sum
        4 * BS,  # the same, clamped
        2 * COPIES,  # weights by expert
        4 * 2 * BS * F,  # gate, silu(gate), up and their product of the shared expert
    )
    moe = {"num_experts": E, "num_experts_per_token": K, "expert_intermediate_size": F, "first_dense_layers": 0}
    experts = moe | {"shared_expert_intermediate_size": F}

    kept = kept_by_a_layer("ernie4_5_moe", head_dim=D // H, moe=experts)

    assert kept == sum((*NORM, *ATTENTION, *NORM, *EXPERTS, *terms))


def test_a_router_in_fp32_is_held_updated_and_corrected_in_fp32() -> None:
    moe = {"num_experts": E, "num_experts_per_token": K, "expert_intermediate_size": F, "first_dense_layers": 0}
    run = {
        "model": SIZES | {"architecture": "ernie4_5_moe", "moe": moe | {"shared_expert_intermediate_size": F}},
        "training": {"b": B, "s": S, "recipe": "pure", "implementation": "huggingface"},
    }

    rows = memcalc.estimate(run).ledger.rows
    held = {(row.component, row.tensor): row.bytes for row in rows if row.module.endswith("mlp.router")}

    assert held[Component.WEIGHTS, "weight"] == held[Component.GRADIENTS, "weight gradient"] == 4 * L * E * D
    assert next(row.bytes for row in rows if row.tensor == "router biases") == 4 * L * E


def test_granite_weighs_by_the_softmax_of_the_best_logits() -> None:
    without = EXPERTS[1:]  # probabilities of all experts
    weights = (
        4 * COPIES,  # the softmax of the best
        2 * COPIES,  # weights by expert
    )

    assert kept_by_a_layer("granitemoe") == sum((*NORM, *ATTENTION, *NORM, *without, *weights))


def test_phimoe_draws_each_expert_from_probabilities_of_its_own() -> None:
    """In the dtype of the logits; of the multipliers' custom backward nothing reaches what they are drawn by."""
    norm = (2 * BSD, 2 * 4 * BS, 2 * BSD)  # its input, means and deviations; its output
    without = EXPERTS[2:]  # probabilities of all experts in fp32, which are chosen
    drawn = (
        BS * E,  # which scores are out of reach
        2 * BS * E,  # probabilities of the others
        2 * BS,  # that of the expert
        8 * BS,  # which this is
    )
    weights = 2 * COPIES  # by expert

    assert kept_by_a_layer("phimoe") == sum((*norm, *ATTENTION, *norm, *without, *drawn, *drawn, weights))


def test_llama4_shows_every_token_to_every_expert() -> None:
    normed = (4 * BSD + 4 * BS * H) * 2  # of turned q and k: fp32, deviations
    everywhere = E * BS
    terms = (
        8 * COPIES,  # where the best logits are
        4 * BS * E,  # sigmoids in fp32
        2 * everywhere * D,  # a copy of all tokens for each expert
        2 * everywhere,  # scores by expert
        2 * everywhere * D,  # tokens times these
        2 * everywhere * 2 * F,  # gate and up
        2 * 2 * everywhere * F,  # silu(gate), and times up
        4 * 2 * BS * F,  # gate, silu(gate), up and their product of the shared expert
    )
    moe = {"num_experts": E, "num_experts_per_token": K, "expert_intermediate_size": F}

    kept = kept_by_a_layer("llama4_text", head_dim=D // H, moe=moe | {"shared_expert_intermediate_size": F})

    assert kept == sum((*NORM, *ATTENTION, normed, *NORM, *terms))


def test_a_layer_of_llama4_that_turns_nothing_keeps_temperatures_in_place_of_norms() -> None:
    moe = {"num_experts": E, "num_experts_per_token": K, "expert_intermediate_size": F}
    experts = moe | {"shared_expert_intermediate_size": F}
    turned, others = (
        kept_by_a_layer("llama4_text", head_dim=D // H, moe=experts, full_attention_interval=every) for every in (4, 1)
    )

    assert turned - others == (4 * BSD + 4 * BS * H) * 2 - 4 * S


def test_gpt_oss_keeps_probabilities_with_sinks_and_what_its_clamps_read() -> None:
    norm = (
        4 * BSD,  # its input in fp32
        4 * BS,  # the reciprocal deviation
        4 * BSD,  # normed in fp32, for the weight's gradient
        2 * BSD,  # times the weight, of the matrices behind
    )
    attention = (
        3 * 2 * BSD,  # q and k, turned, and v by head
        8 * B * H * S,  # where the largest logits are
        2 * B * H * S * (S + 1),  # probabilities, of sinks too
        2 * BSD,  # what attention makes, by token
    )
    experts = (
        8 * COPIES,  # which experts
        2 * COPIES,  # the softmax of their logits
        *EXPERTS[2:8],  # orders, ends, copies of tokens, gate and up
        8 * COPIES,  # experts in order, of which biases are taken
        5 * 2 * COPIES * F,  # gate, clamped; its sigmoid; their product; up + 1; and that product
        2 * COPIES * D,  # what experts make
        2 * COPIES,  # weights by expert
    )

    kept = kept_by_a_layer("gpt_oss", "eager", head_dim=D // H, sliding_window=0)

    assert kept == sum((*norm, *attention, *norm, *experts))


def latent(architecture: str = "deepseek_v3", **training: object) -> dict[str, object]:
    widths = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    moe = {"num_experts": 8, "num_experts_per_token": K, "expert_intermediate_size": F}
    experts = moe | {"shared_expert_intermediate_size": F, "first_dense_layers": L}
    return {
        "model": SIZES | {"architecture": architecture, "mla": widths, "moe": experts},
        "training": {"b": B, "s": S, "recipe": "pure", "implementation": "huggingface"} | training,
    }


@pytest.mark.parametrize("architecture", ["deepseek_v2", "deepseek_v3"])
def test_deepseek_keeps_latents_and_what_comes_of_them(architecture: str) -> None:
    q, kv, turned, plain, value = 24, 16, 4, 8, 6
    norms = sum((4 * BS * width + 4 * BS + 2 * BS * width + 2 * BS * width) for width in (q, kv))
    attention = (
        2 * BS * H * (plain + turned),  # q, joined
        2 * BS * H * (plain + turned),  # k, written part by part
        2 * BS * H * (plain + value),  # what keys and values are made of
        2 * BS * H * value,  # what attention makes
        4 * B * H * S,  # log-sum-exp
    )
    mlp = 4 * 2 * BS * F  # gate, silu(gate), up and their product

    run = latent(architecture, attention="memory-efficient")
    kept = memcalc.estimate(run).ledger.components("loss_1")[Component.ACTIVATIONS]

    assert kept == L * sum((*NORM, norms, *attention, *NORM, mlp))


def test_flash_is_refused_where_values_are_not_as_wide_as_keys() -> None:
    run = latent(attention="flash") | {"parallelism": {"engine": "ddp", "data_parallel": 2}}

    with pytest.raises(InputError, match="no kernel for deepseek_v3"):
        memcalc.estimate(run)
