"""The divergence of a student's logits from a teacher's: what is as large as logits in the loss and in backward."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger

V, B, S = 40_000, 2, 64
T = B * S
MODEL = {"l": 1, "d": 64, "h": 4, "V": V, "tie_word_embeddings": False}
TEACHER = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": V, "tie_word_embeddings": False}
CHUNKED = {"loss": "chunked", "loss_recompute": False, "logits_until": "loss", "loss_chunks": 1}


def ledger(*overrides: str, **training: object) -> Ledger:
    given = {"b": B, "s": S, "recipe": "pure", "teacher": TEACHER} | CHUNKED | training
    return memcalc.estimate({"model": MODEL, "training": given}, *overrides).ledger


def logits(run: Ledger, phase: str) -> int:
    """Bytes of what is as large as logits."""
    return sum(row.bytes for row in run.live_rows(phase, Component.LOGITS_AND_LOSS) if V in row.shape)


def test_a_forward_divergence_keeps_probabilities_log_probabilities_and_a_mask() -> None:
    """torchtune's ForwardKLLoss: fp32 probabilities of the teacher 4, log-probabilities of the student 4, a mask 1.

    In the loss also both models' bf16 logits 2 + 2, and of the cross-entropy an fp32 copy 4 and log-probabilities 4; in
    backward its log-probabilities 4, their gradient 4 and that of their logits 4.
    """
    run = ledger()

    assert logits(run, "loss_1") == (4 + 4 + 1 + 2 + 2 + 4 + 4) * T * V
    assert logits(run, "backward_1") == (4 + 4 + 1 + 4 + 4 + 4) * T * V


@pytest.mark.parametrize(
    ("divergence", "saved"),
    [
        ("reverse", 4 + 4 + 4 + 1),  # probabilities and log-probabilities of the student, those of the teacher, a mask
        ("symmetric", (4 + 4 + 4 + 1) + (4 + 4 + 1)),  # those of both, each from the logits once more
    ],
)
def test_a_reverse_divergence_has_four_gradients_at_its_peak(divergence: str, saved: int) -> None:
    """torchtune's ReverseKLLoss: of the first product both factors' gradients wait, of the second its own and one more.

    By then the gradient of the cross-entropy waits, in bf16, and the mask is freed.
    """
    run = ledger(f"divergence={divergence}")

    assert logits(run, "backward_1") == (saved - 1 + 4 * 4 + 2) * T * V


def test_chunks_bound_copies_alone() -> None:
    """What is saved of all chunks stays; an fp32 copy is that of one chunk."""
    one, eight = ledger(), ledger("loss_chunks=8")

    assert logits(one, "loss_1") - logits(eight, "loss_1") == 4 * T * V * 7 // 8


def test_whole_logits_in_fp32_need_no_copies() -> None:
    """Both models' fp32 logits 4 + 4, the divergence's 4 + 4 + 1, and its products before and after the mask 4 + 4."""
    run = ledger(loss="materialized", loss_recompute=True, logits_dtype="fp32")

    assert logits(run, "loss_1") == (4 + 4 + 4 + 4 + 1 + 4 + 4) * T * V
