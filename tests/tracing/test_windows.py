"""What a mask costs more than a kernel that knows the window: as the estimate has it, phase by phase."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger

SIZES = (
    *("hidden_size=512", "num_attention_heads=8", "num_key_value_heads=2", "head_dim=64", "intermediate_size=1024"),
    *("vocab_size=1000", "num_layers=4", "model.sliding_window=100", "implementation=huggingface"),
)


def asked(ledger: Ledger, phase: str) -> int:
    """Return requested bytes, without block rounding."""
    return ledger.totals[phase] - ledger.components(phase).get(Component.BLOCK_ROUNDING, 0)


@pytest.mark.parametrize(
    "settings",
    [
        ("recipe=pure", "b=2", "s=131", "recompute=full"),
        *(
            pytest.param(settings, marks=pytest.mark.long)
            for settings in (
                ("recipe=pure", "b=1", "s=131"),
                ("recipe=amp", "b=2", "s=136", "recompute=every-2"),
                ("recipe=amp", "b=2", "s=131", "dropout=0.1", "logits_until=loss"),
                ("recipe=fp32", "attention=memory-efficient", "b=2", "s=130"),
                ("recipe=mixed-20", "b=3", "s=130", "finetune=lora", "lora.rank=8"),
                ("recipe=pure", "b=3", "s=130", "num_key_value_heads=8"),
                ("recipe=pure", "b=3", "s=130", "attention=eager"),
            )
        ),
    ],
    ids=" ".join,
)
def test_estimate_and_trace_agree_on_the_memory_of_the_mask(settings: tuple[str, ...]) -> None:
    """The boolean mask of s² bytes is not counted at the end of forward, because the inner model has freed it."""
    run = ("mistral-7b", *(size for size in SIZES if size.partition("=")[0] not in " ".join(settings)), *settings)
    estimated, traced = (
        [size(*run, f"attention_windows={how}").ledger for how in ("mask", "kernel")]
        for size in (memcalc.estimate, lambda *given: memcalc.trace(*given, steps=2))
    )
    length = memcalc.load(*run).training.sequence_length

    for phase in ("forward_2", "loss_2", "backward_2", "optimizer_step_2"):
        ours, theirs = (asked(mask, phase) - asked(kernel, phase) for mask, kernel in (estimated, traced))
        assert ours - theirs in ((0, length**2) if phase == "forward_2" else (0,)), phase
