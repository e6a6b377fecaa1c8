"""Host memory of paged optimizers: their states, but for small tensors, in bytes that the states' shapes give."""

from __future__ import annotations

import pytest

import memcalc

# Of GPT-2 small: tensors of 100,000 elements and more (embeddings 50257 x 768 and 1024 x 768, and four matrices in each
# of 12 layers: 768 x 2304, 768 x 768, and twice 768 x 3072). Norms and biases are smaller.
LARGE = 50257 * 768 + 1024 * 768 + 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072)


def host_notes(*overrides: str) -> list[str]:
    result = memcalc.estimate("gpt2", *overrides)
    return [note for note in result.notes if note.startswith("Host memory")]


@pytest.mark.parametrize(
    ("optimizer", "each"),
    [("adamw", 2 * 4), ("adam", 2 * 4), ("lion", 4), ("adam-8bit", 2 * 1), ("lion-8bit", 1)],
)
def test_host_memory_is_named(optimizer: str, each: int) -> None:
    """32-bit states have 4 bytes per element and moment, 8-bit states 1; their scales stay on the GPU."""
    (note,) = host_notes(f"optimizer={optimizer}", "optimizer_options.paged=true")

    assert f"({each * LARGE:,} bytes) per rank" in note


def test_others_need_none() -> None:
    assert host_notes("optimizer=adamw") == []
