"""What layers of transformers' GPT-like families keep for backward, term by term, in bf16.

A LayerNorm keeps a mean and a reciprocal deviation in fp32 for every token: 2 · 4 bytes.
"""

from __future__ import annotations

import pytest

import memcalc
from memcalc.architectures.catalogue import has_formulas
from memcalc.errors import InputError
from memcalc.ledger.component import Component

B, S, D, H, L = 2, 32, 64, 4, 3
BSD = B * S * D
MAP = B * H * S * S  # elements of an attention map
NORMS = 2 * 2 * 4 * B * S
SIZES: dict[str, object] = {
    "num_layers": L,
    "hidden_size": D,
    "num_attention_heads": H,
    "vocab_size": 100,
    "max_position_embeddings": S,
}


def kept_by_a_layer(family: str, *words: str, **model: object) -> int:
    run = {
        "model": SIZES | model | {"architecture": family},
        "training": {"b": B, "s": S, "recipe": "pure", "implementation": "huggingface"},
    }
    return memcalc.estimate(run, *words).ledger.components("loss_1")[Component.ACTIVATIONS] // L


@pytest.mark.parametrize("parallel", [True, False])
def test_gpt_neox_keeps_the_fused_product_beside_what_it_turns(parallel: bool) -> None:
    """v is a view of all of q, k and v; flash attention hands on head by head, which the output matrix cannot read."""
    kept = kept_by_a_layer("gpt_neox", "dropout=0", "attention=flash", parallel_block=parallel)
    terms = (
        2 * BSD,  # layer input
        2 * BSD,  # input_norm output, of the fused matrix
        3 * 2 * BSD,  # its product
        2 * 2 * BSD,  # q and k, their turned part and the rest joined
        4 * B * H * S,  # log-sum-exp
        2 * BSD,  # what attention makes
        2 * BSD,  # the same token by token
        0 if parallel else 2 * BSD,  # attention sum, of the second norm
        2 * BSD,  # post_attention_norm output
        2 * 4 * BSD,  # input of gelu
        2 * 4 * BSD,  # its output
    )

    assert kept == sum(terms) + NORMS


@pytest.mark.parametrize(("gelu", "kept"), [("exact", 1), ("tanh", 1), ("new", 4), ("fast", 7)])
def test_a_gelu_of_several_operators_keeps_what_each_needs(gelu: str, kept: int) -> None:
    """new: x of its cube, tanh, and x/2 and 1 + tanh of the last product; fast: both factors of three products.

    Those are 0.044715 x and x, sqrt(2/pi) x and 1 + 0.044715 x², x/2 and 1 + tanh; and tanh's own output.
    """
    inner = 2 * 4 * BSD
    least = kept_by_a_layer("gpt_neox", "dropout=0", "attention=flash", gelu="exact")

    assert kept_by_a_layer("gpt_neox", "dropout=0", "attention=flash", gelu=gelu) == least + (kept - 1) * inner


def test_phi_keeps_one_norms_output_for_attention_and_mlp() -> None:
    """Queries and keys are copied when they are joined; what they were projected as is kept by nobody."""
    kept = kept_by_a_layer("phi", "dropout=0", "attention=flash", gelu="exact")
    terms = (
        2 * BSD,  # layer input
        2 * BSD,  # norm's output
        2 * 2 * BSD,  # q and k, their turned part and the rest joined
        2 * BSD,  # v
        4 * B * H * S,  # log-sum-exp
        2 * BSD,  # what attention makes
        2 * BSD,  # the same token by token
        2 * 4 * BSD,  # input of gelu
        2 * 4 * BSD,  # its output
    )

    assert kept == sum(terms) + NORMS // 2


@pytest.mark.parametrize("b", [1, 2])
def test_one_key_head_is_copied_for_each_query_head_of_several_sequences_alone(b: int) -> None:
    """Of one sequence a product reads the same head again and again."""
    kept = kept_by_a_layer("gpt_bigcode", f"b={b}", "dropout=0", "attention=eager", num_key_value_heads=1)
    bsd = b * S * D
    terms = (
        2 * bsd,  # layer input
        2 * bsd,  # norm's output
        2 * bsd if b > 1 else 2 * (bsd + 2 * bsd // H),  # q by head, or the product that all three are views of
        2 * 2 * bsd if b > 1 else 0,  # k and v by head
        4 * b * H * S * S,  # probabilities in fp32
        2 * b * H * S * S,  # in bf16
        2 * bsd,  # what attention makes, token by token
        2 * bsd,  # attention sum
        2 * bsd,  # norm's output
        2 * 4 * bsd,  # input of gelu
        2 * 4 * bsd,  # its output
    )

    assert kept == sum(terms) + b * NORMS // B


@pytest.mark.parametrize(("family", "before_and_behind"), [("gpt_neo", (2, 2)), ("gptj", (1, 0))])
def test_queries_and_keys_in_fp32_make_probabilities_of_fp32(family: str, before_and_behind: tuple[int, int]) -> None:
    """GPT-Neo has a norm before the MLP and its input, too; GPT-J turns queries and keys, which makes new ones."""
    norms, second = before_and_behind
    kept = kept_by_a_layer(family, "dropout=0", gelu="exact", **({"rotary_dim": 8} if family == "gptj" else {}))
    tables = 0 if family == "gpt_neo" else 2 * 2 * 2 * S * 8  # sines and cosines for q and k, 8 features, in bf16
    terms = (
        2 * BSD,  # layer input
        2 * BSD,  # norm's output
        2 * 4 * BSD,  # q and k in fp32, by head
        2 * BSD,  # v by head
        4 * MAP,  # probabilities in fp32
        2 * MAP,  # in bf16
        2 * BSD,  # what attention makes, token by token
        second * 2 * BSD,  # attention sum, norm's output
        2 * 4 * BSD,  # input of gelu
        2 * 4 * BSD,  # its output
        tables,
    )

    assert kept == sum(terms) + norms * NORMS // 2


@pytest.mark.parametrize("kv", [1, 2])
def test_falcon_copies_its_keys_and_values(kv: int) -> None:
    """One key head is read by all query heads once it is copied by head; groups of heads are copied beforehand."""
    kept = kept_by_a_layer(
        "falcon", "dropout=0", "attention=eager", num_key_value_heads=kv, norms_per_layer=kv, intermediate_size=4 * D
    )
    terms = (
        2 * BSD,  # layer input
        kv * 2 * BSD,  # output of one norm, or of one each for attention and MLP
        3 * 2 * BSD,  # q, k and v by head
        2 * MAP,  # probabilities in bf16
        2 * BSD,  # what attention makes, token by token
        2 * 4 * BSD,  # input of gelu
        2 * 4 * BSD,  # its output
    )

    assert kept == sum(terms) + kv * NORMS // 2


def test_falcon_with_alibi_keeps_a_fused_product_and_a_mask_of_all_heads_that_layers_share() -> None:
    kept = kept_by_a_layer("falcon", "dropout=0", "attention=memory-efficient", position_embedding="alibi")
    terms = (
        2 * BSD,  # layer input
        2 * BSD,  # norm's output
        3 * 2 * BSD,  # q, k and v, of which kernels are given views
        2 * BSD,  # what attention makes
        4 * B * H * S,  # log-sum-exp
        2 * 4 * BSD,  # input of gelu
        2 * 4 * BSD,  # its output
    )

    assert kept == sum(terms) + NORMS // 2


def test_falcon_without_alibi_keeps_a_mask_in_each_layer() -> None:
    kept = kept_by_a_layer("falcon", "dropout=0", "attention=memory-efficient")
    terms = (
        2 * BSD,  # layer input
        2 * BSD,  # norm's output
        2 * 2 * BSD,  # q and k, turned
        3 * 2 * BSD,  # v, a part of the fused product
        2 * B * S * S,  # the mask in bf16
        2 * BSD,  # what attention makes
        4 * B * H * S,  # log-sum-exp
        2 * 4 * BSD,  # input of gelu
        2 * 4 * BSD,  # its output
    )

    assert kept == sum(terms) + NORMS // 2


@pytest.mark.parametrize(("attention", "kv", "why"), [("flash", H, "a mask"), ("memory-efficient", 1, "one key head")])
def test_falcon_has_no_kernel(attention: str, kv: int, why: str) -> None:
    run = {
        "model": SIZES | {"architecture": "falcon", "num_key_value_heads": kv},
        "training": {"implementation": "huggingface", "attention": attention},
        "parallelism": {"engine": "ddp", "data_parallel": 2},
    }

    assert not has_formulas(memcalc.load(run))
    with pytest.raises(InputError, match=f"{attention} has no kernel for falcon, .*{why}"):
        memcalc.estimate(run)


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_alibi_is_nothing_that_a_layer_keeps(family: str) -> None:
    """It needs no gradient, so neither sums nor products with it keep it; of the gelus each keeps its input.

    BLOOM's embedding has a norm, which keeps what it is given.
    """
    kept = kept_by_a_layer(family, "dropout=0")
    terms = (
        2 * BSD,  # layer input
        2 * BSD,  # norm's output
        3 * 2 * BSD,  # q, k and v by head
        4 * MAP,  # probabilities in fp32
        2 * MAP,  # in bf16
        2 * BSD,  # what attention makes, token by token
        2 * BSD,  # attention sum
        2 * BSD,  # norm's output
        2 * 4 * BSD,  # input of gelu
        2 * 4 * BSD,  # its output
        (2 * BSD + NORMS // 2) // L if family == "bloom" else 0,
    )

    assert kept == sum(terms) + NORMS


@pytest.mark.parametrize("family", ["bloom", "codegen", "gpt_neo", "gptj", "mpt"])
def test_what_attends_by_products_alone_does_so_by_default(family: str) -> None:
    run = {"model": SIZES | {"architecture": family}, "training": {"implementation": "huggingface"}}

    assert memcalc.load(run).training.attention == "eager"
    with pytest.raises(
        memcalc.InputError, match=f"transformers' {family} does not support sdpa, but attention = flash"
    ):
        memcalc.load(run, "attention=flash")


def test_opt_keeps_relu_once() -> None:
    """The output of relu is what both its backward and the next matrix need."""
    kept = kept_by_a_layer("opt", "dropout=0.1", "attention=eager")
    terms = (
        2 * BSD,  # layer input
        2 * BSD,  # norm's output, of q, k and v
        3 * 2 * BSD,  # q, k and v by head
        4 * MAP,  # probabilities in fp32
        MAP,  # dropout mask
        2 * MAP,  # dropped probabilities in bf16
        2 * BSD,  # what attention makes, token by token
        BSD,  # dropout mask
        2 * BSD,  # attention sum
        2 * BSD,  # norm's output
        2 * 4 * BSD,  # relu
        BSD,  # dropout mask
    )

    assert kept == sum(terms) + NORMS
