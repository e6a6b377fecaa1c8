"""What LitGPT and torchtune do that decides memory, from their own files."""

from __future__ import annotations

from pathlib import Path

import pytest

import memcalc
from memcalc.importers.loading import load
from memcalc.ledger.component import Component
from memcalc.spec.spec import Spec

LITGPT = "checkpoint_dir: checkpoints/meta-llama/Llama-3.2-1B\nprecision: {precision}\ntrain:\n  micro_batch_size: 1\n  max_seq_length: 1000\n"
TORCHTUNE = (
    "model:\n  _component_: torchtune.models.llama3_2.llama3_2_1b\ntokenizer:\n  max_seq_len: 512\nbatch_size: 2\n"
    "optimizer:\n  _component_: torch.optim.AdamW\ndtype: {dtype}\nloss:\n  _component_: {loss}\n"
)


def loaded(tmp_path: Path, text: str, *words: str) -> Spec:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load(path, words)


def test_litgpts_full_fine_tuning(tmp_path: Path) -> None:
    """Chunks of 128 tokens: 8 of 1,000; the head has a matrix of its own, whatever the checkpoint's config says."""
    spec = loaded(tmp_path, LITGPT.format(precision="bf16-true"))
    training = spec.training

    assert not spec.model.tie_word_embeddings
    assert (training.loss, training.loss_recompute, training.chunked_head, training.loss_chunks) == (
        *("chunked", False, False),
        8,
    )
    assert (training.logits_dtype, training.logits_until, training.norm_dtype) == ("fp32", "step", "fp32")
    assert training.repeat_kv


def test_litgpt_evaluates_a_micro_batch_before_the_first_step_and_between_steps(tmp_path: Path) -> None:
    """finetune/full.py, validate: chunk_size=0; pretrain.py, validate: the chunks of training."""
    text = LITGPT.format(precision="bf16-true").replace("micro_batch_size: 1", "micro_batch_size: 3")
    fine_tuned = loaded(tmp_path, text).training
    trained = loaded(tmp_path, text.replace("checkpoint_dir: checkpoints/meta-llama/", "model_name: ")).training

    for training, loss in ((fine_tuned, "whole"), (trained, "training")):
        assert (training.evaluation_batch_size, training.evaluation_when) == (3, "both")
        assert training.evaluation_loss == loss


def test_litgpts_adapters_have_dropout_and_the_head_in_chunks(tmp_path: Path) -> None:
    training = loaded(tmp_path, LITGPT.format(precision="bf16-true") + "lora_r: 8\n").training

    assert training.lora is not None
    assert training.lora.dropout == 0.05
    assert training.lora.target_modules == ("q_proj", "v_proj")
    assert training.chunked_head


def test_litgpt_in_fp32_converts_nothing(tmp_path: Path) -> None:
    assert loaded(tmp_path, LITGPT.format(precision="32-true")).training.logits_dtype == "compute"


def test_adapters_are_litgpts_own(tmp_path: Path) -> None:
    text = (
        LITGPT.format(precision="bf16-true").replace("meta-llama/Llama-3.2-1B", "EleutherAI/pythia-160m")
        + "lora_r: 8\nlora_mlp: true\n"
    )
    path = tmp_path / "config.yaml"
    path.write_text(text)
    training = load(path, ()).training

    assert training.lora is not None
    assert training.lora.implementation == "litgpt"
    assert training.lora.target_modules == ("q_proj", "v_proj", "up_proj", "down_proj")
    assert training.lora.modules_to_save == ()


def test_a_4_bit_base_has_an_embedding_that_trains(tmp_path: Path) -> None:
    """finetune/lora.py, main: bitsandbytes' StableEmbedding in place of wte, which keeps its name beside it."""
    path = tmp_path / "config.yaml"
    path.write_text(LITGPT.format(precision="bf16-true") + "lora_r: 8\nquantize: bnb.nf4\n")
    training = load(path, ()).training

    assert training.lora is not None
    assert training.lora.modules_to_save == ("embed_tokens",)
    assert training.qlora is not None
    assert training.qlora.original_dtype == "fp16"


def test_that_embeddings_gradient_is_never_freed(tmp_path: Path) -> None:
    """The optimizer has the embedding that it replaced: V x d in bf16 remain from the first backward on."""
    path = tmp_path / "config.yaml"
    path.write_text(LITGPT.format(precision="bf16-true") + "lora_r: 8\nquantize: bnb.nf4\n")
    found = memcalc.estimate(path).replayed
    model = found.spec.model

    for phase in ("forward_2", "loss_2"):
        assert found.ledger.components(phase)[Component.GRADIENTS] == 2 * model.vocab_size * model.hidden_size
    assert Component.GRADIENTS not in found.ledger.components("forward_1")


def test_an_adapter_of_litgpts_head(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(LITGPT.format(precision="bf16-true") + "lora_r: 8\nlora_head: true\n")
    training = load(path, ()).training

    assert training.lora is not None
    assert training.lora.target_modules == ("q_proj", "v_proj", "lm_head")


@pytest.mark.parametrize("loss", ["CEWithChunkedOutputLoss", "LinearCrossEntropyLoss"])
def test_torchtunes_chunks_stay(loss: str, tmp_path: Path) -> None:
    training = loaded(tmp_path, TORCHTUNE.format(dtype="bf16", loss=f"torchtune.modules.loss.{loss}")).training

    assert (training.loss, training.loss_recompute, training.loss_chunks) == ("chunked", False, 8)
    assert (training.logits_until, training.norm_dtype, training.repeat_kv) == ("loss", "fp32", True)


def test_torchtunes_projections_are_separate(tmp_path: Path) -> None:
    """Phi-3's checkpoint has one matrix for q, k and v (models/phi3/_convert_weights.py)."""
    text = TORCHTUNE.format(dtype="bf16", loss="torchtune.modules.loss.LinearCrossEntropyLoss").replace(
        "models.llama3_2.llama3_2_1b",
        "models.phi3.lora_phi3_mini\n  lora_attn_modules: [q_proj, v_proj]\n  apply_lora_to_output: true",
    )
    training = (spec := loaded(tmp_path, text)).training

    assert not spec.model.fused_qkv
    assert training.lora is not None
    assert training.lora.target_modules == ("q_proj", "v_proj", "lm_head")


def test_torchtunes_fake_quantization(tmp_path: Path) -> None:
    """training/quantization.py: the module swap is the same quantizer; torchao's group has 256 elements."""
    text = TORCHTUNE.format(dtype="bf16", loss="torchtune.modules.loss.LinearCrossEntropyLoss")
    quantizer = "quantizer:\n  _component_: torchtune.training.quantization."
    spec = loaded(tmp_path, text + quantizer + "Int8DynActInt4WeightQATQuantizer\n  groupsize: 32\n")
    swapped = loaded(tmp_path, text + quantizer + "Int8DynActInt4WeightQATQuantizerModuleSwap\n")
    other = loaded(tmp_path, text + quantizer + "Int4WeightOnlyQATQuantizer\n")

    assert (spec.training.fake_quantization, spec.training.fake_quantization_group) == ("int8-int4", 32)
    assert (swapped.training.fake_quantization, swapped.training.fake_quantization_group) == ("int8-int4", 256)
    assert other.training.fake_quantization == "none"
    assert [limit.feature for limit in other.origin.limits if limit.holds_memory] == [
        "quantization-aware training with Int4WeightOnlyQATQuantizer"
    ]


def test_torchtunes_dora(tmp_path: Path) -> None:
    text = TORCHTUNE.format(dtype="bf16", loss="torchtune.modules.loss.LinearCrossEntropyLoss").replace(
        "llama3_2.llama3_2_1b", "llama3_2.lora_llama3_2_1b\n  lora_attn_modules: [q_proj]\n  use_dora: True"
    )
    lora = loaded(tmp_path, text).training.lora

    assert lora is not None
    assert lora.dora


def test_torchtunes_other_losses_have_logits_in_fp32(tmp_path: Path) -> None:
    """modules/transformer.py: self.output(h).float()"""
    training = loaded(tmp_path, TORCHTUNE.format(dtype="bf16", loss="torch.nn.CrossEntropyLoss")).training

    assert (training.loss, training.logits_dtype) == ("materialized", "fp32")


def test_torchtune_in_fp32_has_fused_norms(tmp_path: Path) -> None:
    text = TORCHTUNE.format(dtype="fp32", loss="torchtune.modules.loss.CEWithChunkedOutputLoss")

    assert loaded(tmp_path, text).training.norm_dtype == "input"


def test_torchtunes_rotary_cache_has_all_positions(tmp_path: Path) -> None:
    """131,072 positions x 64 features in fp32: 32 MiB."""
    from memcalc.api import estimate

    text = TORCHTUNE.format(dtype="bf16", loss="torchtune.modules.loss.CEWithChunkedOutputLoss")
    rows = estimate(loaded(tmp_path, text)).ledger.rows

    assert [row.bytes for row in rows if row.tensor == "RoPE cos/sin caches"] == [131072 * 64 * 4]


@pytest.mark.parametrize("word", ["implementation=huggingface", "loss=materialized"])
def test_what_a_user_sets_is_not_refused_for_what_the_program_does(word: str, tmp_path: Path) -> None:
    field, _, value = word.partition("=")
    text = TORCHTUNE.format(dtype="bf16", loss="torchtune.modules.loss.CEWithChunkedOutputLoss")
    for spec in (loaded(tmp_path, text, word), loaded(tmp_path, LITGPT.format(precision="bf16-true"), word)):
        assert getattr(spec.training, field) == value
