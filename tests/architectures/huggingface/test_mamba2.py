"""What layers of Nemotron-H keep for backward, term by term: Mamba-2 in chunks of tokens, attention, MLP, experts.

Pure bf16 without dropout, as in test_dense_layers: a bf16 element is 2 bytes, an fp32 one 4.
"""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.layout.parameters import count_parameters
from memcalc.layout.peft_parameters import trainable_parameters
from memcalc.ledger.component import Component
from memcalc.spec.model_families.conversion import read_hf_config

B, S, D, F, Q = 2, 100, 64, 96, 32
CHUNKS = 4  # of 32 tokens: 100 rounded up to 128
PADDED = CHUNKS * Q
HEADS, SIZE, GROUPS, STATE, CONV = 4, 8, 2, 12, 4  # Mamba-2's heads and their size; tokens of the convolution
H, KV, HEAD = 4, 2, 16
E, K, F_E, F_S = 4, 2, 40, 24
TOKENS = B * S
INNER = HEADS * SIZE
CHANNELS = INNER + 2 * GROUPS * STATE

# fp32 input 4, normed in fp32 4, output 2; the reciprocal deviation of each token; the weight in fp32 is no activation
NORM = 10 * TOKENS * D + 4 * TOKENS

PAIRS = B * HEADS * CHUNKS * Q * Q  # of tokens of one chunk
OF_STATE = B * PADDED * HEADS * STATE
OF_VALUES = B * PADDED * INNER
ENDS = CHUNKS + 1  # the states of all chunks, and the one before the first
MAMBA = (
    2 * TOKENS * (INNER + CHANNELS + HEADS)  # in_proj's output
    + 2 * 4 * HEADS  # exp(A_log), and its negative
    + 2 * B * CHANNELS * (S + CONV - 1)  # the convolution's output, with the positions that are cut off
    + 2 * 2 * TOKENS * HEADS  # dt + dt_bias, and its softplus
    + 2 * 4 * TOKENS * HEADS  # time steps in fp32: of values, of decays
    + 4 * TOKENS * INNER  # values in fp32
    + 4 * OF_VALUES  # values, padded, for the skip connection
    + 4 * OF_STATE  # state inputs, padded
    + 2 * Q * Q  # two masks of pairs
    + 3 * 4 * PAIRS  # decay factors, outputs·inputs, their product
    + 2 * 4 * OF_STATE  # outputs and inputs of that matmul, in order
    + 4 * OF_VALUES  # values of the second matmul, in order
    + 2 * 4 * B * HEADS * PADDED  # factors of the decay left, and of states
    + 4 * (OF_VALUES + OF_STATE)  # both factors of the chunks' states, in order
    + 2 * ENDS * ENDS  # two masks of pairs of chunks
    + 4 * B * HEADS * ENDS * ENDS  # factors between chunks
    + 4 * B * ENDS * INNER * STATE  # their states, in order
    + 4 * (OF_STATE + B * CHUNKS * INNER * STATE)  # outputs and states of the last matmul, in order
    + 4 * OF_VALUES  # the output of states, before its decay
    # the gated norm: its padded input, gate, silu and product in fp32; normed; a deviation for each group; the output
    + 4 * OF_VALUES
    + 4 * 4 * TOKENS * INNER
    + 4 * TOKENS * GROUPS
    + 2 * TOKENS * INNER
)
ATTENTION = (
    2 * TOKENS * (H + 2 * KV) * HEAD  # q, k, v
    + 2 * TOKENS * H * HEAD  # attention's output
    + 4 * TOKENS * H  # log-sum-exps
)
MLP = 3 * 2 * TOKENS * F - 2 * TOKENS * F  # relu, and relu²; relu saves its output, not its input


def run(pattern: str, **training: object) -> dict[str, Any]:
    """A model of these layers, of the letters of Nemotron-H."""
    model = {
        "architecture": "nemotron_h",
        "layer_pattern": pattern,
        "hidden_size": D,
        "num_attention_heads": H,
        "num_key_value_heads": KV,
        "head_dim": HEAD,
        "intermediate_size": F,
        "vocab_size": 100,
        "mamba": {
            "num_heads": HEADS,
            "head_dim": SIZE,
            "num_groups": GROUPS,
            "state_size": STATE,
            "conv_kernel": CONV,
            "chunk_size": Q,
        },
        "moe": {
            "num_experts": E,
            "num_experts_per_token": K,
            "expert_intermediate_size": F_E,
            "shared_expert_intermediate_size": F_S,
        },
    }
    settings = {"implementation": "huggingface", "recipe": "pure", "attention": "flash", "b": B, "s": S}
    return {"model": model, "training": settings | training}


def kept(pattern: str, **training: object) -> int:
    ledger = memcalc.estimate(run(pattern, **training)).ledger
    return ledger.components("loss_1")[Component.ACTIVATIONS]


def test_a_layer_with_mamba_2_keeps() -> None:
    assert kept("M-M*") - kept("M-*") == NORM + MAMBA


def test_a_layer_with_attention_keeps() -> None:
    assert kept("M-**") - kept("M-*") == NORM + ATTENTION


def test_a_layer_with_an_mlp_keeps() -> None:
    assert kept("M--*") - kept("M-*") == NORM + MLP


def test_one_chunk_keeps_fewer_copies() -> None:
    """A sequence of one chunk: matmuls read views of values and states, since the axis of chunks has one entry."""
    tokens, pairs = B * Q, B * HEADS * Q * Q
    state, values, ends = tokens * HEADS * STATE, tokens * INNER, 2

    one = (
        2 * tokens * (INNER + CHANNELS + HEADS)
        + 2 * 4 * HEADS
        + 2 * B * CHANNELS * (Q + CONV - 1)
        + 2 * 2 * tokens * HEADS
        + 2 * 4 * tokens * HEADS
        + 4 * values  # in fp32, before padding
        + 4 * values  # padded, for the skip connection
        + 4 * values  # times their steps, padded: read by two matmuls
        + 4 * state  # inputs, padded
        + 2 * Q * Q
        + 3 * 4 * pairs
        + 4 * 4 * state  # outputs and inputs, inputs that are left, outputs again: in order
        + 2 * 4 * tokens * HEADS
        + 2 * ends * ends
        + 4 * B * HEADS * ends * ends
        + 4 * B * ends * INNER * STATE  # the states, in order
        + 4 * B * ends * INNER * STATE  # summed states, of which the last matmul reads a view
        + 4 * values  # the output of states
        + 4 * values  # input of the norm
        + 4 * 4 * values
        + 4 * tokens * GROUPS
        + 2 * values
    )
    norm = 10 * tokens * D + 4 * tokens

    assert kept("M-M*", s=Q) - kept("M-*", s=Q) == norm + one


def test_the_order_of_layers_does_not_matter_to_what_they_keep() -> None:
    assert kept("MM-E*") == kept("E*M-M") == kept("-ME*M")


def test_recomputed_layers_keep_their_inputs() -> None:
    """A further layer of any letter: its input in bf16."""
    assert {kept(f"M{letter}", recompute="full") - kept("M", recompute="full") for letter in "M*-E"} == {2 * TOKENS * D}


def test_a_pattern_is_repeated_or_cut_to_the_number_of_layers() -> None:
    pattern = run("M-*")
    whole, longer = (memcalc.load(pattern, f"l={layers}").model for layers in (3, 7))

    assert (whole.mixers, longer.mixers) == ("M-*", "M-*M-*M")
    assert count_parameters(longer) == count_parameters(memcalc.load(run("M-*M-*M")).model)
    assert memcalc.load(pattern, "l=1").model.mixers == "M"


def test_parameters_of_the_8b_model() -> None:
    """nvidia/Nemotron-H-8B-Base-8K (arXiv 2504.03624, table 1): 24 Mamba-2, 24 MLP and 4 attention layers.

    In fields: 8 groups and a state of 128; the embedding and the LM head are separate.
    """
    d, f, inner, heads, vocabulary = 4096, 21504, 8192, 128, 131072
    channels = inner + 2 * 8 * 128
    mamba = d * (inner + channels + heads) + channels * (4 + 1) + 3 * heads + inner + inner * d
    attention = 2 * d * 32 * 128 + 2 * d * 8 * 128
    expected = 24 * (mamba + d) + 24 * (2 * d * f + d) + 4 * (attention + d) + 2 * vocabulary * d + d
    config = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "vocab_size": vocabulary,
    }
    model = memcalc.load({"model": read_hf_config(config, "config.json"), "training": run("M")["training"]}).model

    assert (model.num_layers, model.moe) == (52, None)
    assert count_parameters(model) == expected == 8_100_852_736


def test_experts_without_layers_of_them_are_dropped() -> None:
    assert memcalc.load(run("M-*")).model.moe is None
    assert memcalc.load(run("*-")).model.mamba is None
    assert memcalc.load(run("ME")).model.moe is not None


def test_adapters_are_on_all_linear_layers_that_peft_allows() -> None:
    """PEFT rejects adapters of out_proj in models of Mamba-2; the router and stacked experts are no linear layers."""
    spec = memcalc.load(run("M*-E", lora={"rank": 8}, finetune="lora"))
    projected = INNER + CHANNELS + HEADS
    adapted = (
        *((D, projected),),
        *((D, H * HEAD), (D, KV * HEAD), (D, KV * HEAD), (H * HEAD, D)),
        *((D, F), (F, D)),
        *((D, F_S), (F_S, D)),  # the shared expert
    )
    assert trainable_parameters(spec) == 8 * sum(into + out for into, out in adapted)


def test_what_is_counted_is_said() -> None:
    limits = memcalc.estimate(run("M")).not_modelled

    assert any("kernels of mamba-ssm and causal-conv1d" in str(limit) for limit in limits)


@pytest.mark.parametrize("implementation", ["plain", "megatron"])
def test_other_modules_are_refused(implementation: str) -> None:
    with pytest.raises(InputError, match=r"layers of a single module\. Set implementation: huggingface"):
        memcalc.estimate(run("M*", implementation=implementation))


def test_generation_is_refused() -> None:
    with pytest.raises(InputError, match="generation of a model with layers of a single module is not modelled"):
        memcalc.estimate({"model": run("M*")["model"], "inference": {"prompt_length": 10, "new_tokens": 1}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "llama"}, "layer_pattern = 'M-', which modules of llama do not have"),
        ({"layer_pattern": "E-"} | {"moe": None, "architecture": None}, "has the letter E, but model.moe is not set"),
        ({"layer_pattern": "MX"}, "layer_pattern"),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused(fields: dict[str, Any], message: str) -> None:
    given = run("M-")
    with pytest.raises(InputError, match=message):
        memcalc.estimate({**given, "model": given["model"] | fields})
