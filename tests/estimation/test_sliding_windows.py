"""A window that the sequence fills: transformers' sdpa makes a mask, and what each layer keeps then."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.ledger.component import Component

B, S, HEADS, KV, WIDTH = 2, 4096, 32, 8, 128
RUN = ("mistral-7b", "implementation=huggingface", "recipe=pure", "num_layers=4", f"b={B}")
MASK = 2 * B * S * S  # in bf16, for each sequence
REPEATED = 2 * 2 * B * S * (HEADS - KV) * WIDTH  # keys and values, once for each query head


def saved(*overrides: str) -> int:
    return memcalc.estimate(*RUN, *overrides).ledger.components("loss_1")[Component.ACTIVATIONS]


def test_each_layer_keeps_a_mask_and_keys_and_values_for_each_head() -> None:
    mask, kernel = (saved(f"s={S}", f"attention_windows={how}") for how in ("mask", "kernel"))

    assert mask - kernel == 4 * (MASK + REPEATED)


def test_rows_of_a_mask_are_a_multiple_of_eight() -> None:
    """s 4,099: 4,104 elements in a row, as memory-efficient attention wants them."""
    odd = 4099
    mask, kernel = (saved(f"s={odd}", f"attention_windows={how}") for how in ("mask", "kernel"))

    log_sum_exps = 4 * B * HEADS * (4128 - odd)  # rows of 32
    repeated = 2 * 2 * B * odd * (HEADS - KV) * WIDTH
    assert mask - kernel == 4 * (2 * B * odd * 4104 + repeated + log_sum_exps)


def test_a_shorter_sequence_needs_none() -> None:
    mask, kernel = (memcalc.estimate(*RUN, "s=4095", f"attention_windows={how}") for how in ("mask", "kernel"))

    assert mask.ledger.totals == kernel.ledger.totals
    assert not any("window" in note for note in mask.notes)


def test_it_is_said() -> None:
    notes = memcalc.estimate(*RUN, f"s={S}").notes

    assert any("fills the window of 4096 tokens" in note and "attention_windows: kernel" in note for note in notes)


def test_one_layer_at_a_time_where_all_are_recomputed() -> None:
    mask, kernel = (
        memcalc.estimate(*RUN, f"s={S}", "recompute=full", f"attention_windows={how}").ledger
        for how in ("mask", "kernel")
    )
    truth = S * S  # of truth values, which a checkpoint's closure holds

    assert mask.totals["loss_1"] - kernel.totals["loss_1"] == truth
    assert mask.peak_bytes - kernel.peak_bytes >= truth + MASK


def test_plain_modules_make_no_masks() -> None:
    assert memcalc.load("mistral-7b").training.attention_windows == "kernel"
    with pytest.raises(InputError, match="attention_windows = mask needs transformers' modules"):
        memcalc.load("mistral-7b", "attention_windows=mask")
