"""Liger's kernels in transformers' modules: what layers save, and the note that they are not counted."""

from __future__ import annotations

import importlib.util

import pytest

import memcalc
from memcalc.errors import InputError, Unavailable
from memcalc.ledger.component import Component

B, S, D, F, LAYERS = 2, 1024, 2048, 8192, 4
RUN = ("llama-3.2-1b", "implementation=huggingface", "recipe=pure", f"b={B}", f"s={S}", f"num_layers={LAYERS}")


@pytest.mark.parametrize("layers", [1, LAYERS])
def test_a_layer_keeps_less(layers: int) -> None:
    """Of each of two norms: x in 2 bytes for x in fp32 and what it is normed to, 4 less. Of the MLP silu(gate) less."""
    kept = [
        memcalc.estimate(*RUN, f"num_layers={layers}", f"kernels={kernels}").ledger.components("loss_1")
        for kernels in ("torch", "liger")
    ]
    torch, liger = (found[Component.ACTIVATIONS] for found in kept)

    assert torch - liger == layers * (2 * 4 * B * S * D + 2 * B * S * F)


def test_other_modules_than_transformers_have_no_such_kernels() -> None:
    with pytest.raises(InputError, match=r"kernels = liger .* implementation = plain") as caught:
        memcalc.load("llama-3.2-1b", "kernels=liger")

    assert "implementation: huggingface" in (caught.value.remedy or "")


def test_families_without_liger_kernels_are_named() -> None:
    found = memcalc.estimate("gpt2", "implementation=huggingface", "kernels=liger")

    assert "Liger's kernels in modules of gpt2: PyTorch's are counted" in found.not_modelled
    assert found.ledger.totals == memcalc.estimate("gpt2", "implementation=huggingface").ledger.totals


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="it is installed")
def test_a_step_needs_the_package() -> None:
    with pytest.raises(Unavailable, match="pip install liger-kernel"):
        memcalc.trace(*RUN, "num_layers=1", "V=1000", "kernels=liger")
