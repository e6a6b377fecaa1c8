"""Answers of `fit` that several tests draw, each searched once."""

from functools import cache
from typing import Any

import pytest

import memcalc
from memcalc.search.result import FitResult
from tests.records import pin_records

HELD = ("context_parallel", "recompute")  # fewer layouts to judge

ON_A_T4 = ("dtype=fp16", "attention=memory-efficient")  # it has no flash attention, and this kernel in fp16 only

CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "layouts": (
        "llama-3-8b",
        ("s=8192", "recipe=mixed-16"),
        {"gpu": "h100-80gb", "gpus": 16, "top": 3, "hold": HELD},
    ),
    "one_card": ("gpt2", ("recipe=amp",), {"gpu": "rtx-4090"}),
    "nothing": ("llama-3-8b", ON_A_T4, {"gpu": "t4"}),
    "experts": (
        "granite-3.0-1b-a400m",
        ("l=8", "recipe=mixed-16"),
        {"gpu": "l40s", "gpus": 4, "top": 2, "hold": HELD},
    ),
    "cost": (
        "llama-3-8b",
        ("recipe=mixed-16",),
        {"minimize": "cost", "top": 1, "prices": {"a100-40gb": 1.0, "t4": 0.2, "h100-80gb": 2.1}, "gpus": 8},
    ),
    "fewest": ("llama-3-8b", ("recipe=mixed-16",), {"gpu": "a100-40gb", "minimize": "gpus", "top": 1}),
    "smallest_card": ("llama-3.2-1b", (), {"gpu": "t4", "minimize": "gpu_kind"}),
    "recompute": (
        "llama-3.2-1b",
        (*ON_A_T4, "recipe=pure", "b=4", "loss=chunked"),
        {"gpu": "t4", "minimize": "recompute"},
    ),
    "not_even_full": ("llama-3.2-1b", (*ON_A_T4, "recipe=mixed-16"), {"gpu": "t4", "minimize": "recompute"}),
    "parameters": ("gpt2", ("recipe=amp",), {"gpu": "rtx-4090", "maximize": "parameters"}),
    "changes": ("llama-3-8b", ("l=8", "b=4", "finetune=lora"), {"gpu": "rtx-4090"}),
    "batch": ("gpt2", ON_A_T4, {"gpu": "t4", "maximize": "micro_batch_size"}),
    "none_at_a_price": ("llama-3-70b", (), {"minimize": "cost", "gpus": 2, "prices": {"t4": 0.1}}),
}


@cache
def answer(name: str) -> FitResult:
    """Return what `fit` finds for a case; its verdict uses pinned records."""
    source, overrides, options = CASES[name]
    with pytest.MonkeyPatch.context() as monkeypatch:
        pin_records(monkeypatch)
        return memcalc.fit(source, *overrides, **options)
