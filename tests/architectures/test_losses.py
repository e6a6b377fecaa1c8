"""Losses on a part of the tokens or of the vocabulary: what is alive of the logits, and when gradients appear."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError, Unavailable
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger

D, V, B, S = 64, 40_000, 2, 64
T = B * S
MODEL = {"l": 1, "d": D, "h": 4, "V": V, "tie_word_embeddings": False}
LOGITS = Component.LOGITS_AND_LOSS


def ledger(loss: str, *overrides: str, **training: Any) -> Ledger:
    given = {"b": B, "s": S, "recipe": "pure", "loss": loss} | training
    return memcalc.estimate({"model": MODEL, "training": given}, *overrides).ledger


def logits(run: Ledger, phase: str) -> dict[str, int]:
    """Bytes of what is as large as logits, by name."""
    return {row.tensor: row.bytes for row in run.live_rows(phase, LOGITS) if row.bytes > 2 * T * D}


def test_all_logits_exist_four_times_without_a_special_loss() -> None:
    """bf16 logits 2, an fp32 copy 4, log-probabilities 4 and their gradient 4."""
    assert sum(logits(ledger("materialized"), "backward_1").values()) == (2 + 4 + 4 + 4) * T * V


def test_a_loop_that_keeps_only_the_loss_frees_logits_before_backward() -> None:
    """Log-probabilities 4, their gradient 4 and that of the logits in fp32 4; in the loss nothing changes."""
    named, dropped = ledger("materialized"), ledger("materialized", "logits_until=loss")

    assert sum(logits(dropped, "backward_1").values()) == (4 + 4 + 4) * T * V
    assert named.totals["backward_1"] - dropped.totals["backward_1"] == 2 * T * V
    assert named.totals["loss_1"] == dropped.totals["loss_1"]


@pytest.mark.parametrize("implementation", ["megatron", "torchtitan"])
def test_loops_that_free_logits_get_no_note(implementation: str) -> None:
    run = ("llama-3-8b", f"implementation={implementation}", "data_parallel=8")
    silent, told = memcalc.estimate(*run), memcalc.estimate(*run, "logits_until=backward")

    assert silent.spec.training.logits_until == "loss"
    assert told.ledger.totals == silent.ledger.totals
    assert f"logits_until = backward has no effect: {implementation} releases them earlier." in told.notes
    assert not any("logits_until" in note for note in silent.notes)


@pytest.mark.parametrize("scores", [("reference_model=true",), ("finetune=lora",)], ids=["a second model", "itself"])
def test_log_probabilities_of_pairs_are_read_from_a_copy(scores: tuple[str, ...]) -> None:
    """fp32 logits, and a copy without each last token's: both of the policy and of what scores the pairs for it."""
    given = {"architecture": "llama", "num_key_value_heads": 4, "intermediate_size": 128}
    training = {"b": B, "s": S, "recipe": "amp", "loss": "selective", "pairs": True, "logits_dtype": "fp32"}
    source = {"model": MODEL | given, "training": training | {"implementation": "huggingface"}}
    run = memcalc.estimate(source, *scores).ledger

    pairs = 2 * B
    whole = [row.bytes for row in run.live_rows("loss_2", LOGITS) if row.dtype == "fp32" and V in row.shape]
    assert sum(whole) == 2 * 4 * pairs * (S + S - 1) * V


PAIRS: dict[str, Any] = {"pairs": True, "recipe": "pure", "logits_dtype": "fp32", "logits_until": "loss"}


@pytest.mark.parametrize(("until", "references"), [("loss", 1), ("step", 2)])
def test_log_probabilities_are_gathered_from_those_of_all_logits(until: str, references: int) -> None:
    """The policy's log-probabilities are saved. Its own adapters disabled it makes fp32 logits, and of all but each last
    token's a quotient and log-probabilities; with until = step the logits of the micro-batch before are live, too.
    """
    run = ledger("gathered", "finetune=lora", **PAIRS, reference_logits_until=until)

    pairs = 2 * B
    whole = [row.bytes for row in run.live_rows("loss_2", LOGITS) if row.dtype == "fp32" and V in row.shape]
    assert sum(whole) == 4 * pairs * (references * S + 3 * (S - 1)) * V
    once = [row.bytes for row in run.live_rows("loss_1", LOGITS) if row.dtype == "fp32" and V in row.shape]
    assert sum(once) == 4 * pairs * (S + 3 * (S - 1)) * V


def test_answers_that_are_scored_apart_have_half_the_copies() -> None:
    """Of the reference: fp32 logits, and of one half of the sequences a quotient and log-probabilities."""
    together, apart = (
        ledger("gathered", "reference_model=true", f"scored_apart={each}", **PAIRS) for each in ("false", "true")
    )

    assert logits(together, "loss_2").keys() == logits(apart, "loss_2").keys()
    assert together.totals["loss_2"] - apart.totals["loss_2"] == pytest.approx(4 * 2 * B * (S - 1) * V, rel=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("loss=gathered",), "loss = gathered is of pairs of sequences"),
        (("scored_apart=true",), "scored_apart = true needs loss = gathered"),
        (
            ("pairs=true", "loss=gathered", "reference_logits_until=step"),
            "needs loss = gathered, and a reference model",
        ),
        (("pairs=true", "loss=gathered", "tensor_parallel=2"), "not modelled with a sharded vocabulary"),
    ],
)
def test_pairs_that_are_rejected(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ledger("materialized", *words)


def test_trls_kernel_reads_the_logits_themselves() -> None:
    """trl 1.14 trl/kernels/logprob_entropy.py: in backward the gradient of the slice, and of all logits."""
    given = {"architecture": "llama", "num_key_value_heads": 4, "intermediate_size": 128}
    training = {"b": B, "s": S, "recipe": "amp", "loss": "selective", "pairs": True, "logits_dtype": "fp32"}
    training |= {"implementation": "huggingface", "framework": "dpo", "logits_until": "loss", "reference_model": True}
    run = memcalc.estimate({"model": MODEL | given, "training": training}).ledger

    def in_fp32(phase: str) -> int:
        return sum(row.bytes for row in run.live_rows(phase, LOGITS) if row.dtype == "fp32" and V in row.shape)

    assert in_fp32("loss_2") == 2 * 4 * 2 * B * S * V  # of policy and reference
    assert in_fp32("backward_2") == 4 * 2 * B * (S + S - 1) * V


def test_axolotls_kernel_is_not_run_by_a_trace() -> None:
    with pytest.raises(Unavailable, match="loss = selective runs a Triton kernel"):
        memcalc.trace("llama-3.2-1b", "implementation=huggingface", "pairs=true", "loss=selective", "l=1", "s=8")


def test_selective_is_a_loss_of_pairs() -> None:
    with pytest.raises(InputError, match="loss = selective is a kernel of axolotl"):
        ledger("selective")


@pytest.mark.parametrize("chunks", [1, 4, 8])
def test_of_a_chunked_loss_one_chunk_exists_at_a_time(chunks: int) -> None:
    """Forward: an fp32 copy and its log-probabilities. The logits of bf16 are gone when these are made."""
    run = ledger("chunked", f"loss_chunks={chunks}")

    assert sum(logits(run, "loss_1").values()) == (4 + 4) * T // chunks * V
    assert not logits(run, "forward_1")


def test_a_chunk_that_does_not_divide_is_rounded_up() -> None:
    """128 tokens in 3 chunks: 43, 43 and 42."""
    rows = [
        row
        for row in ledger("chunked", "loss_chunks=3").live_rows("loss_1", LOGITS)
        if row.tensor == "log-probabilities"
    ]

    assert [row.shape for row in rows] == [(43, V)]


def test_the_first_two_chunks_gradients_are_added_out_of_place() -> None:
    """The transpose of a product is a view, to which nothing is added: three gradients of the head for a moment."""
    run = ledger("chunked", "loss_chunks=32")
    rows = [row for row in run.live_rows("backward_1", Component.GRADIENTS) if row.tensor == "lm_head.weight"]

    assert sum(row.count for row in rows) == 3


def test_a_fused_loss_makes_gradients_in_forward() -> None:
    """Liger's rows of logits: ceil(b·s / ceil(V/d)) = ceil(128 / 625) = 1."""
    run = ledger("fused")

    assert logits(run, "loss_1") == {"logits of some rows": 2 * V}
    assert [row.bytes for row in run.live_rows("loss_1", Component.GRADIENTS)] == [2 * V * D]
    assert "gradient of norm output" in {row.tensor for row in run.live_rows("loss_1")}


def test_a_fused_loss_makes_no_gradient_of_a_frozen_head() -> None:
    run = ledger("fused", "lora.rank=4", recipe="pure")

    assert not run.live_rows("loss_1", Component.GRADIENTS)


def test_the_vocabulary_parallel_loss_keeps_one_fp32_copy() -> None:
    """bf16 logits 2, the softmax 4, and in backward the gradient in bf16 2."""
    run = ledger("vocab-parallel")

    assert sum(logits(run, "loss_1").values()) == (2 + 4) * T * V
    assert sum(logits(run, "backward_1").values()) == (2 + 4 + 2) * T * V


@pytest.mark.parametrize("phase", ["loss_1", "backward_1"])
def test_fp32_logits_become_softmax_and_gradient_themselves(phase: str) -> None:
    """`.float()` hands them back as they are, and the rest is done in place."""
    run = ledger("vocab-parallel", recipe="fp32", attention="eager")

    assert {name: size for name, size in logits(run, phase).items() if size > 4 * T * D} == {
        "lm_head output": 4 * T * V
    }


def test_chunks_share_autocast_s_casts_of_a_head_with_a_bias() -> None:
    """Weight and bias are cast once for all chunks, 2 bytes per element, as of a head without a bias."""
    run = memcalc.estimate(
        {"model": MODEL | {"lm_head_bias": True}, "training": {"b": B, "s": S, "recipe": "amp", "loss": "chunked"}}
    ).ledger
    casts = [row for row in run.rows if "autocast cache" in row.tensor and row.tensor.startswith("lm_head")]

    assert {(row.tensor.split()[0], row.bytes) for row in casts if "loss_1" in row.phases} == {
        ("lm_head.weight", 2 * V * D),
        ("lm_head.bias", 2 * V),
    }


@pytest.mark.parametrize("loss", ["chunked", "fused", "vocab-parallel"])
@pytest.mark.parametrize("recipe", ["pure", "amp", "mixed-20"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_every_loss_leaves_the_same_gradients(loss: str, recipe: str, tied: str) -> None:
    """After backward, and with them all copies: how the loss was computed does not show any more."""
    words = (f"tie_word_embeddings={tied}", f"recipe={recipe}")
    one, other = ledger(loss, *words), ledger("materialized", *words)

    for phase in ("optimizer_step_1", "zero_grad_2", "optimizer_step_2"):
        assert one.components(phase) == other.components(phase)


@pytest.mark.parametrize(
    ("loss", "override", "message"),
    [
        ("chunked", "tensor_parallel=2", "loss = chunked is not modelled with a sharded vocabulary or sequence"),
        ("fused", "lm_head_bias=true", "loss = fused is not modelled with model.lm_head_bias = true"),
        ("fused", "qlora.quantize_lm_head=true", "loss = fused needs an unquantized LM head"),
    ],
)
def test_what_no_kernel_does_is_refused(loss: str, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ledger(loss, override)


OF_PAIRS = (
    *("llama-3.2-1b", "num_layers=2", "implementation=huggingface", "recipe=pure", "b=2", "s=128"),
    *("training.pairs=true", "training.loss=selective", "training.framework=dpo"),
)


def test_trl_averages_a_copy_of_half_of_the_logits() -> None:
    """8 sequences of 8 pairs, without their last token, over the vocabulary, in bf16; beside a reference there is room."""
    ledger = memcalc.estimate(*OF_PAIRS, "evaluation_batch_size=8").ledger
    half = {row.tensor: row.bytes for row in ledger.rows if "evaluation" in row.phases}

    assert half["logits of chosen or rejected sequences"] == 8 * 127 * 128256 * 2
    tensors = {row.tensor for row in memcalc.estimate(*OF_PAIRS, "reference_model=true").ledger.rows}
    assert "logits of chosen or rejected sequences" not in tensors


def test_logits_of_a_policy_are_live_until_the_reference_has_scored() -> None:
    """A kernel that copies them lets backward do without them."""
    words = (*OF_PAIRS, "training.framework=axolotl", "reference_model=true")
    returned, kept = (memcalc.estimate(*words, f"logits_until={until}").ledger.totals for until in ("loss", "backward"))

    assert returned["loss_2"] == kept["loss_2"]
    assert kept["backward_2"] - returned["backward_2"] == 4 * 128 * 128256 * 2
