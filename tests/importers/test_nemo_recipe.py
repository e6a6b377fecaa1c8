"""NeMo 2's recipes: what their classes say, and the vocabulary that follows from a tokenizer."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import memcalc
from memcalc.importers.loading import import_file
from memcalc.layout.parameters import count_parameters
from tests.importers.excerpts import NEMO_RECIPE


def recipe(folder: Path, name: str, **blocks: Any) -> Path:
    """A recipe of a class of that name, on one GPU."""
    data = {
        "_target_": "nemo.collections.llm.api.finetune",
        "model": {"_target_": "nemo.X", "config": {"_target_": f"nemo.collections.llm.gpt.model.{name}"}},
        "trainer": {"_target_": "nemo.lightning.pytorch.trainer.Trainer", "devices": 1},
    } | blocks
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


# Published counts in billions (model cards and papers); those of NeMo's classes where these tie no embeddings.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama.Llama2Config7B", 6.738),
        ("llama.Llama3Config8B", 8.030),
        ("llama.Llama31Config405B", 405.853),
        ("llama.Llama32Config1B", 1.236),
        ("mistral.MistralConfig7B", 7.242),
        ("mixtral.MixtralConfig8x7B", 46.703),
        ("gemma.GemmaConfig7B", 8.538),
        ("qwen2.Qwen25Config7B", 7.616),
        ("qwen3.Qwen3Config235B_A22B", 235.094),
        ("deepseek.DeepSeekV3Config", 671.026),
        ("deepseek.DeepSeekV2LiteConfig", 15.706),
        ("starcoder2.Starcoder2Config15B", 15.958),
        ("base.GPTConfig175B", 174.605),
    ],
)
def test_a_class_is_the_model_that_it_is_named_after(name: str, billions: float, tmp_path: Path) -> None:
    assert round(count_parameters(memcalc.load(recipe(tmp_path, name)).model) / 1e9, 3) == billions


@pytest.mark.parametrize(
    ("data", "verb", "vocabulary"),
    [
        ({}, "finetune", 128256),  # the model's own
        ({}, "pretrain", 50304),  # GPT-2's, which data modules take
        ({"tokenizer": {"vocab_size": 128256}}, "pretrain", 128384),  # NullTokenizer adds an end
        ({"tokenizer": {"pretrained_model_name": "mistralai/Mistral-7B-v0.1"}}, "pretrain", 32000),
    ],
)
def test_the_vocabulary_is_that_of_the_tokenizer(
    data: dict[str, Any], verb: str, vocabulary: int, tmp_path: Path
) -> None:
    path = recipe(tmp_path, "llama.Llama3Config8B", data=data, _target_=f"nemo.collections.llm.api.{verb}")

    assert memcalc.load(path).model.vocab_size == vocabulary


def test_a_tokenizer_that_is_not_known_is_asked_for(tmp_path: Path) -> None:
    path = recipe(tmp_path, "llama.Llama3Config8B", data={"tokenizer": {"pretrained_model_name": "our/own"}})

    with pytest.raises(memcalc.InputError, match=r"does not define the model \(missing vocab_size\)\."):
        memcalc.load(path)
    assert memcalc.load(path, "vocab_size=64000").model.vocab_size == 64000


def test_silence_is_what_nemo_does(tmp_path: Path) -> None:
    """data modules: 4 sequences of 2,048 tokens, 8 a step; GPTModel: the distributed optimizer; bf16."""
    spec = memcalc.load(recipe(tmp_path, "llama.Llama3Config8B"))

    assert (spec.training.micro_batch_size, spec.training.sequence_length) == (4, 2048)
    assert (spec.training.gradient_accumulation_steps, spec.parallelism.zero_stage) == (2, 1)
    assert (spec.training.dtype, spec.training.gradient_dtype, spec.training.dropout) == ("bf16", None, 0.0)


def test_unmodelled_features_are_reported(tmp_path: Path) -> None:
    """Adapters, other strategies, several instances of the optimizer, and plugins that come as a list."""
    trainer = {
        "_target_": "nemo.lightning.pytorch.trainer.Trainer",
        "devices": 2,
        "plugins": [{"_target_": "nemo.X", "precision": "16-mixed"}],
        "strategy": {"_target_": "nemo.FSDP2Strategy", "num_distributed_optimizer_instances": 2},
    }
    peft = {"_target_": "nemo.collections.llm.peft.lora.LoRA", "dim": 8}
    path = recipe(tmp_path, "llama.Llama3Config8B", trainer=trainer, peft=peft)
    found = import_file(path)
    assert found is not None

    for words in ("NeMo's adapters", "nemo.FSDP2Strategy", "several instances of the distributed optimizer"):
        assert any(note.startswith("not modelled: ") and words in note for note in found.notes), words
    assert memcalc.load(path).training.dtype == "fp16"


def test_a_class_that_is_not_known_has_its_sizes_asked_for(tmp_path: Path) -> None:
    path = recipe(tmp_path, "tomorrow.Llama9Config8B")

    with pytest.raises(memcalc.InputError, match=r"does not define the model \(missing num_layers, hidden_size"):
        memcalc.load(path)
    notes = memcalc.load(path, "preset=llama-3-8b").origin.notes
    assert any("Llama9Config8B" in note for note in notes)


def test_fields_that_the_table_does_not_have_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(NEMO_RECIPE)
    found = import_file(path)

    assert found is not None
    assert found.unknown == ("model.config.a_field_of_tomorrow",)
