"""What torchao allocates to quantize a weight of torchtune's QLoRA, and to restore it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import memcalc
from memcalc.workspaces import Script, most, nf4

N, W = 3072 * 3072, 2  # q_proj of Llama-3.2-3B, in bf16


def left(script: Script) -> Counter[int]:
    """Return the sizes of what stays, how often each."""
    return Counter(size for size in script if size > 0) - Counter(-size for size in script if size < 0)


def test_a_restored_weight_leaves_indices_values_and_scales() -> None:
    """As captured: two of 37,748,736 bytes, four of 9,437,184 and the scales of 294,912."""
    assert left(nf4.dequantized(N, W)) == {37_748_736: 2, 9_437_184: 4, 294_912: 1}
    assert sum(left(nf4.dequantized(N, W)).elements()) == 8 * N + 2 * W * N + W * N // 64


def test_a_quantized_weight_leaves_half_a_byte_per_element_and_its_scales() -> None:
    """Scales of 8 bits for each 64 elements, and a factor in the weight's dtype for each 256 of these."""
    assert left(nf4.quantized(N, W)) == {N // 2: 1, N // 64: 1, W * N // 64 // 256: 1}


@pytest.mark.parametrize("elements", [2**19, 2**20, 3 * 2**20 + 2**18])
def test_distances_to_all_values_are_of_at_most_a_million_elements(elements: int) -> None:
    """16 values of 2 bytes, the difference and its absolute value: 2·32·2^20 bytes beside the blocks."""
    assert most(nf4.quantized(elements, W)) >= 2 * 16 * W * min(elements, 2**20)
    assert most(nf4.quantized(elements, W)) < 2 * 16 * W * min(elements, 2**20) + 8 * elements


def test_norms_of_rows_need_the_weight_the_adapters_product_and_their_sum() -> None:
    assert sum(left(nf4.row_norms(N, W)).elements()) == W * N * 3
    assert most(nf4.row_norms(N, W)) >= 8 * N + 3 * W * N


QLORA = """model:
  _component_: torchtune.models.llama3_1.qlora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj]
  apply_lora_to_mlp: false
  lora_rank: 8
  lora_alpha: 16
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 256
dataset:
  _component_: torchtune.datasets.alpaca_dataset
  packed: true
batch_size: 1
optimizer:
  _component_: torch.optim.AdamW
  fused: true
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
gradient_accumulation_steps: 1
compile: false
device: cuda
dtype: bf16
enable_activation_checkpointing: true
"""


def test_short_sequences_have_their_peak_where_a_weight_of_the_mlp_is_restored(tmp_path: Path) -> None:
    """Llama-3.1-8B: 4096·14336 elements need 12·n bytes and the weight itself; logits of 256 tokens much less."""
    path = tmp_path / "config.yaml"
    path.write_text(QLORA)
    result = memcalc.estimate(path, gpu="h100-80gb")
    n = 4096 * 14336

    assert result.ledger.peak_phase.startswith(("forward", "backward"))
    rows = [row for row in result.ledger.rows if "dequantiz" in row.tensor and result.ledger.peak_phase in row.phases]
    assert sum(row.bytes for row in rows) >= 12 * n
