"""What one layer of transformers' Llama-like families keeps for backward, term by term.

Pure bf16, flash attention, no dropout: each bf16 element is 2 bytes, each fp32 one 4. A norm's composite form keeps its
input in fp32 (4), the reciprocal deviation (4 a token) and what its weight's gradient needs.
"""

from __future__ import annotations

import pytest

import memcalc
from memcalc.ledger.component import Component

B, S, D, H, KV, F = 2, 32, 64, 4, 2, 96
BSD = B * S * D  # 4096
BSK = BSD * KV // H  # keys, and values
BSF = B * S * F
TOKEN = 4 * B * S  # one fp32 number for each token
LSE = 4 * B * H * S  # log-sum-exps of flash attention

# fp32 input 4, normed in bf16 2, output 2: Llama's norm before a branch
NORM = 8 * BSD + TOKEN
# gate 2, silu 2, up 2, product 2
GATED = 8 * BSF
# rotated q 2, attention output 2; rotated k 2, v 2
ATTENTION = 4 * BSD + 4 * BSK + LSE

LAYERS = {
    "llama": 2 * NORM + ATTENTION + GATED,
    "smollm3": 2 * NORM + ATTENTION + GATED,
    "granite": 2 * NORM + ATTENTION + GATED,  # multipliers by numbers keep nothing
    "seed_oss": 2 * NORM + ATTENTION + GATED,
    # v's product has q and k, too: 2 each; the output is copied by token, 2
    "phi3": 2 * NORM + ATTENTION + 4 * BSD + 2 * BSK + GATED,
    # fp32 input 4, normed in fp32 4, output 2; 1 + weight in fp32
    "gemma": 2 * (10 * BSD + TOKEN + 4 * D) + ATTENTION + GATED,
    # Two more such norms, of the branches' outputs, which are not saved themselves; each head of q and k has one, too
    "gemma3_text": 2 * (10 * BSD + TOKEN + 4 * D)
    + 2 * (8 * BSD + TOKEN + 4 * D)
    + (8 * BSD + H * TOKEN + 4 * 16)
    + (8 * BSK + KV * TOKEN + 4 * 16)
    + ATTENTION
    + GATED,
    # relu's output 2, its square 2
    "arcee": 2 * NORM + ATTENTION + 4 * BSF,
    # PyTorch's LayerNorm: input 2, output 2, mean and deviation; gelu's input 2 and output 2
    "starcoder2": 2 * (4 * BSD + 2 * TOKEN) + ATTENTION + 4 * BSF,
    # One norm: what x is less its mean 4, and 4 once more, normed in fp32 4, output 2; the copy of its weight in fp32 is
    # a temporary, as copies of parameters are. q: as much but the output; k as well.
    "cohere": (14 * BSD + TOKEN) + (12 * BSD + H * TOKEN) + (12 * BSK + KV * TOKEN) + ATTENTION + GATED,
    "cohere2": (14 * BSD + TOKEN) + ATTENTION + GATED,
    # q: LayerNorms' input 2, mean and deviation for each head; k as well. The output is copied by token, 2.
    "stablelm": 2 * (4 * BSD + 2 * TOKEN)
    + (2 * BSD + 2 * H * TOKEN)
    + (2 * BSK + 2 * KV * TOKEN)
    + ATTENTION
    + 2 * BSD
    + GATED,
    # LayerNorm of fp32: its input 4, mean and deviation; its output in bf16 2
    "olmo": 2 * (6 * BSD + 2 * TOKEN) + ATTENTION + GATED,
    # Layer input 2. q: fp32 4, normed in fp32 4; k as well. Output norms: 4 + 4 each. The MLP's input 2.
    "olmo2": 2 * BSD + (8 * BSD + TOKEN) + (8 * BSK + TOKEN) + ATTENTION + 2 * (8 * BSD + TOKEN) + 2 * BSD + GATED,
    "olmo3": 2 * BSD + (8 * BSD + TOKEN) + (8 * BSK + TOKEN) + ATTENTION + 2 * (8 * BSD + TOKEN) + 2 * BSD + GATED,
    # Layer input 2. Norms of heads: fp32 4, normed 2; of the branches' outputs: the same. The MLP's input 2.
    "exaone4": 2 * BSD
    + (6 * BSD + H * TOKEN)
    + (6 * BSK + KV * TOKEN)
    + ATTENTION
    + 2 * (6 * BSD + TOKEN)
    + 2 * BSD
    + GATED,
    # Tables of pairs in fp32, s·d_h each: 2 · 4 · 32 · 16
    "ernie4_5": 2 * NORM + ATTENTION + GATED + 2 * 4 * S * 16,
    # Half of each head turns: tables of pairs 2 · 2 · 32 · 8; the output is copied by token, 2
    "glm": 2 * NORM + ATTENTION + 2 * BSD + GATED + 2 * 2 * S * 8,
    # Two more norms, of the branches' outputs: fp32 4, normed 2
    "glm4": 2 * NORM + ATTENTION + 2 * BSD + GATED + 2 * 2 * S * 8 + 2 * (6 * BSD + TOKEN),
    # Rotated heads are normed: fp32 4, normed 2
    "hunyuan_v1_dense": 2 * NORM + ATTENTION + (6 * BSD + H * TOKEN) + (6 * BSK + KV * TOKEN) + GATED,
    # Norms of heads as well. xIELU: its input 2, alpha x 2, expm1 2, expm1 - x 2, x > 0 1, and its output 2.
    "apertus": 2 * NORM + ATTENTION + (6 * BSD + H * TOKEN) + (6 * BSK + KV * TOKEN) + 11 * BSF,
    # LayerNorm of weight + 1, 2 each; half of each head turns, so the output is copied by token, 2; relu 2, its square 2
    "nemotron": 2 * (4 * BSD + 2 * TOKEN + 2 * D) + ATTENTION + 2 * BSD + 4 * BSF,
    # Norms without weights: fp32 4, output 2. Turned q and k: fp32 4. The MLP: relu's output 2, its square 2.
    "nanochat": 2 * (6 * BSD + TOKEN) + (4 * BSD + 4 * TOKEN) + (4 * BSK + 2 * TOKEN) + ATTENTION + 4 * BSF,
}

HALF_TURNS = ("glm", "glm4", "nemotron")  # of each head
NORMED_HEADS = ("cohere", "stablelm")  # where the config says so


@pytest.mark.parametrize("family", LAYERS)
def test_a_layer_keeps(family: str) -> None:
    assert kept_by_one_layer(family, {}, "flash") == LAYERS[family]


def kept_by_one_layer(family: str, fields: dict[str, object], attention: str, recipe: str = "pure") -> int:
    """Return the tensors that a third layer saves in addition."""
    model: dict[str, object] = {
        "architecture": family,
        "num_layers": 1,
        "hidden_size": D,
        "num_attention_heads": H,
        "num_key_value_heads": KV,
        "intermediate_size": F,
        "vocab_size": 100,
        "head_dim": 16,
        "rotary_dim": 8 if family in HALF_TURNS else 16,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
    }
    model |= {"qk_norm": True} if family in NORMED_HEADS else {}
    training = {"implementation": "huggingface", "recipe": recipe, "attention": attention, "b": B, "s": S}

    def kept(layers: int) -> int:
        run = {"model": model | fields | {"num_layers": layers}, "training": training}
        return memcalc.estimate(run).ledger.components("loss_1")[Component.ACTIVATIONS]

    return kept(3) - kept(2)


@pytest.mark.parametrize("key_heads", [KV, 1])
def test_the_math_kernel_keeps_keys_and_values_of_every_query_head(key_heads: int) -> None:
    """Llama, in fp32: 4 bytes each."""
    scores = B * H * S * S
    # q by head, scaled k, v, the output by token; the probabilities; its mask and the repeated k are temporary
    attention = 4 * 4 * BSD + 4 * scores
    # norm: input, normed, output; MLP: gate, silu, up, product
    norm, gated = 12 * BSD + TOKEN, 16 * BSF

    kept = kept_by_one_layer("llama", {"num_key_value_heads": key_heads}, "math", "fp32")

    assert kept == 2 * norm + attention + gated


def test_capped_scores_keep_what_tanh_made() -> None:
    """Gemma 2, eager. Of several sequences products read copies: q 2, k and v for every query head 2 each."""
    scores = B * H * S * S
    before, after = 10 * BSD + TOKEN + 4 * D, 8 * BSD + TOKEN + 4 * D
    # tanh's output 2, softmax's 4, its cast 2
    attention = 3 * 2 * BSD + 8 * scores + 2 * BSD

    assert kept_by_one_layer("gemma2", {}, "eager") == 2 * before + 2 * after + attention + GATED


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("smollm3", {"unrotated_layers": (0, 1, 2)}),
        ("exaone4", {"full_attention_interval": 1}),
        ("cohere2", {"full_attention_interval": 1}),
    ],
)
def test_a_layer_that_turns_nothing_keeps_as_much(family: str, fields: dict[str, object]) -> None:
    """Queries and keys as they are in place of turned ones, and casts of them are none."""
    assert kept_by_one_layer(family, fields, "flash") == LAYERS[family]
