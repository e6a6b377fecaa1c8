"""An optimizer that steps within backward: requests of a trace, arithmetic at the peak, and rules."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from tools.request_order import compare

WIDTH, INNER, VOCAB, LAYERS = 128, 256, 512, 2
SIZES = (
    *(f"num_layers={LAYERS}", f"hidden_size={WIDTH}", f"intermediate_size={INNER}", f"vocab_size={VOCAB}"),
    *("num_attention_heads=2", "num_key_value_heads=2", "head_dim=64", "b=2", "s=64", "recipe=pure"),
)
ASKED = "optimizer_in_backward=true"


def run(*words: str) -> Ledger:
    return memcalc.estimate("llama-3.2-1b", *SIZES, ASKED, *words).ledger


def of(ledger: Ledger, component: Component, phase: str) -> int:
    return sum(row.bytes for row in ledger.rows if row.component is component and phase in row.phases)


@pytest.mark.parametrize(
    "words",
    [
        ("implementation=plain", "optimizer_implementation=for-loop"),
        pytest.param(("implementation=plain", "optimizer=adagrad", "recompute=full"), marks=pytest.mark.long),
        ("implementation=huggingface", "optimizer_implementation=fused"),
        ("implementation=huggingface", "optimizer=momentum", "tie_word_embeddings=false"),
    ],
    ids=" ".join,
)
def test_requests_are_the_traces(words: tuple[str, ...]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    difference = compare(memcalc.load("llama-3.2-1b", *SIZES, ASKED, *words, gpu="a100-80gb"))
    assert difference is None, str(difference)


def test_no_gradient_outlives_backward() -> None:
    """Weights and two moments of 2 bytes remain: 4 bytes of state per parameter and nothing else between steps."""
    ledger = run("optimizer_implementation=fused")
    parameters = of(ledger, Component.WEIGHTS, "forward_2") // 2

    for phase in ("optimizer_step_1", "zero_grad_2", "forward_2", "optimizer_step_2"):
        assert of(ledger, Component.GRADIENTS, phase) == 0, phase
    counters = 4 * (2 + LAYERS * 7)  # fused: a step counter of each parameter; a plain layer has 5 matrices, 2 norms
    assert of(ledger, Component.OPTIMIZER_STATE, "forward_2") == 4 * parameters + counters


def test_the_peak_has_the_gradients_of_one_parameter_instead_of_all() -> None:
    """Of a model with few tokens the gradients decide: the tied table's, of head and embedding, beside their sum."""
    few = ("b=1", "s=1", "optimizer_implementation=fused")
    gradients = of(run(*few), Component.GRADIENTS, "backward_2")

    assert gradients <= 3 * 2 * WIDTH * VOCAB
    assert (
        of(memcalc.estimate("llama-3.2-1b", *SIZES, *few).ledger, Component.GRADIENTS, "optimizer_step_2") > gradients
    )


@pytest.mark.parametrize(
    ("words", "bytes_per_element"),
    [
        (("optimizer_implementation=fused",), 2),  # the gradient
        (("optimizer_implementation=foreach",), 2 + 2),  # and the square root of its second moment
        (("optimizer_implementation=for-loop",), 2 + 2 + 2),  # and the denominator
    ],
)
def test_update_of_the_largest_matrix(words: tuple[str, ...], bytes_per_element: int) -> None:
    """A table that many times exceeds everything else is updated last, after nothing but states is left."""
    ledger = run(*words, "tie_word_embeddings=false", "vocab_size=65536", "b=1", "s=1", "recompute=full")
    transient = ledger.totals["backward_2"] - ledger.totals["zero_grad_2"]
    table = WIDTH * 65536

    assert abs(transient - bytes_per_element * table) < table // 4


def test_8_bit_states_have_their_maps_for_each_parameter() -> None:
    """bitsandbytes: two maps of 256 fp32 numbers in every optimizer, and there is one for each parameter in 8 bits."""
    alone, together = (
        sum(row.bytes for row in ledger.rows if row.module == "optimizer" and "forward_2" in row.phases)
        for ledger in (
            run("optimizer=adam-8bit"),
            memcalc.estimate("llama-3.2-1b", *SIZES, "optimizer=adam-8bit").ledger,
        )
    )

    assert together == 2 * 256 * 4
    assert alone == (1 + LAYERS * 5) * together  # the table and the matrices of each layer; norms are too small


@pytest.mark.parametrize(
    "word",
    [
        "gradient_accumulation_steps=2",
        "gradient_clipping=1.0",
        "recipe=mixed-16",
        "optimizer=muon",
        "ema=fp32",
        "zero_grad=zero",
        "data_parallel=2",
    ],
)
def test_what_needs_all_gradients_is_refused(word: str) -> None:
    with pytest.raises(InputError, match="optimizer_in_backward = true updates each parameter separately"):
        run(word)


def test_ranks_of_any_kind_are_gpus() -> None:
    """The message named data_parallel, with the ranks of tensor parallelism as its value."""
    with pytest.raises(InputError, match=r"but gpus = 2\. Set optimizer_in_backward: false, or gpus: 1\."):
        run("tensor_parallel=2")


def test_lamb_updates_in_backward() -> None:
    """Its norm's scratch memory is no temporary of the parameter's size."""
    words = ("recipe=pure", "optimizer=lamb", "optimizer_in_backward=true")
    found = memcalc.estimate("llama-3.2-1b", *words)

    states = found.ledger.components("optimizer_step_2")[Component.OPTIMIZER_STATE]
    assert states // found.parameters == 2 * 4
