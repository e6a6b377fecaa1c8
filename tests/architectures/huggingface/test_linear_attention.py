"""What layers of Qwen3.5 keep for backward, term by term: linear attention in chunks of 64 tokens, gated attention.

Pure bf16 without dropout, as in test_dense_layers: a bf16 element is 2 bytes, an fp32 one 4.
"""

from __future__ import annotations

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.ledger.component import Component

B, S, D, F = 2, 100, 64, 96
PADDED = 128  # tokens, a multiple of 64
KEYS, VALUES, DK, DV, CONV = 2, 4, 8, 12, 4  # heads and their widths in linear attention; tokens of the convolution
H, KV, HEAD = 4, 2, 16
TOKENS, ROWS = B * S, B * PADDED * VALUES  # rows: of one value head

# fp32 input 4, normed in fp32 4, output 2; the reciprocal deviation of each token, and 1 + weight in fp32
NORM = 10 * TOKENS * D + 4 * TOKENS + 4 * D
GATED = 8 * TOKENS * F  # gate 2, silu 2, up 2, product 2
MIXED = 2 * KEYS * DK + VALUES * DV

LINEAR = (
    2 * TOKENS * MIXED  # in_proj_qkv's output
    + 2 * B * MIXED * (S + CONV - 1)  # the convolution's output, with the positions that are cut off
    + 2 * TOKENS * VALUES  # beta
    + 2 * 4 * TOKENS * VALUES  # a + dt_bias, and its softplus
    + 2 * 4 * VALUES  # exp(A_log), and its negative
    + 2 * (4 * TOKENS * VALUES * DK + 4 * TOKENS * VALUES)  # q and k by head, and their inverse norms
    + 4 * ROWS * (2 * DK + DV + 1)  # q, k, v and beta, padded
    + 4 * ROWS * DK  # beta·k
    + 64 * 64  # the mask of later tokens
    + 5 * 4 * ROWS * 64  # decay between tokens, k·k, q·k, both times the decay
    + 3 * 4 * ROWS  # factors of keys, of queries, and of the keys left
    + 4 * ROWS * (2 * DV + DK)  # new values, corrected values, decayed keys, solved
    + 2 * 4 * ROWS * DK  # decayed queries, keys to write
    + 4 * B * VALUES * PADDED // 64  # the decay of each chunk
    + 4 * B * VALUES * DK * DV * PADDED // 64  # the state before each chunk
    # the gated norm: fp32 input 4, normed 2, output 2, the deviation; z in fp32 4, its silu 4; the gated output 2
    + TOKENS * VALUES * (DV * (4 + 2 + 2 + 4 + 4 + 2) + 4)
)
FULL = (
    (8 * TOKENS * H * HEAD + 4 * TOKENS * H + 4 * HEAD)  # q's norm of heads
    + (8 * TOKENS * KV * HEAD + 4 * TOKENS * KV + 4 * HEAD)  # k's
    + 2 * TOKENS * (H + 2 * KV) * HEAD  # rotated q and k, v
    + 2 * 2 * TOKENS * H * HEAD  # attention's output, and its copy by token
    + 4 * TOKENS * H  # log-sum-exps
    + 2 * 2 * TOKENS * H * HEAD  # sigmoid of the gate, gated output
)


def run(kinds: str, **training: object) -> dict[str, object]:
    """A model of these layers: "l" for linear, "f" for full attention."""
    model = {
        "architecture": "qwen3_5_text",
        "num_layers": len(kinds),
        "hidden_size": D,
        "num_attention_heads": H,
        "num_key_value_heads": KV,
        "head_dim": HEAD,
        "rotary_dim": HEAD // 4,
        "intermediate_size": F,
        "vocab_size": 100,
        "full_attention_interval": 0,
        "full_attention_layers": [layer for layer, kind in enumerate(kinds) if kind == "f"],
        "linear_attention": {
            "num_key_heads": KEYS,
            "num_value_heads": VALUES,
            "key_head_dim": DK,
            "value_head_dim": DV,
            "conv_kernel": CONV,
        },
    }
    settings = {"implementation": "huggingface", "recipe": "pure", "attention": "flash", "b": B, "s": S}
    return {"model": model, "training": settings | training}


def kept(kinds: str) -> int:
    return memcalc.estimate(run(kinds)).ledger.components("loss_1")[Component.ACTIVATIONS]


def test_a_layer_with_linear_attention_keeps() -> None:
    assert kept("lllf") - kept("llf") == 2 * NORM + LINEAR + GATED


def test_a_layer_with_gated_attention_keeps() -> None:
    assert kept("lfff") - kept("lff") == 2 * NORM + FULL + GATED


def test_the_order_of_layers_does_not_matter_to_what_they_keep() -> None:
    assert kept("llff") == kept("flfl") == kept("ffll")


def test_recomputed_layers_keep_their_inputs() -> None:
    """A third layer more: its input in bf16."""

    def inputs(kinds: str) -> int:
        ledger = memcalc.estimate(run(kinds, recompute="full")).ledger
        return ledger.components("loss_1")[Component.ACTIVATIONS]

    assert inputs("llf") - inputs("lf") == inputs("lff") - inputs("lf") == 2 * TOKENS * D


@pytest.mark.parametrize("implementation", ["plain", "megatron"])
def test_other_modules_are_refused(implementation: str) -> None:
    with pytest.raises(InputError, match="does not support linear attention"):
        memcalc.estimate(run("lf", implementation=implementation))


def test_generation_is_refused() -> None:
    with pytest.raises(InputError, match="generation of a model with linear attention is not modelled"):
        memcalc.estimate({"model": run("lf")["model"], "inference": {"prompt_length": 10, "new_tokens": 1}})
