"""Hub ids as runs: Trainer's defaults around a published model, wherever a configuration may name one."""

import json
from pathlib import Path

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.frameworks.lengths import NOTE
from memcalc.importers.loading import load

LLAMA = "meta-llama/Llama-3.1-8B"


def test_a_hub_id_is_a_run_of_trainer() -> None:
    """transformers 5.23 training_args.py: no autocast, fused AdamW, clipping to 1; weights in the checkpoint's bf16."""
    spec = load(LLAMA)

    assert spec.name == LLAMA
    assert (spec.training.micro_batch_size, spec.training.sequence_length) == (1, 2048)
    assert (spec.training.implementation, spec.training.recipe, spec.training.dtype) == ("huggingface", "pure", "bf16")
    assert (spec.training.optimizer, spec.training.optimizer_implementation) == ("adamw", "fused")
    assert (spec.training.gradient_clipping, spec.training.logits_until) == (1.0, "loss")
    assert spec.origin.notes == (
        "assuming transformers 5.23 Trainer with default arguments and micro-batch size 1.",
        NOTE,
        f"model {LLAMA} from memcalc's catalogue.",
    )


def test_of_a_generation_it_is_the_model_alone() -> None:
    """No note speaks of Trainer, or of a training block that nobody wrote."""
    spec = load(LLAMA, ["inference.batch_size=4"])

    assert (spec.name, spec.training.framework) == (LLAMA, None)
    assert spec.origin.notes == (f"model {LLAMA} from memcalc's catalogue.",)


def test_it_is_the_run_of_a_file_of_training_arguments_that_says_no_more(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model_name_or_path: {LLAMA}\nper_device_train_batch_size: 1\n")
    named, written = memcalc.estimate(LLAMA), memcalc.estimate(path, "versions.transformers=v5.23")

    assert named.ledger.totals == written.ledger.totals


@pytest.mark.parametrize(
    "name",
    [
        *("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"),
        *("adafactor", "lion_32bit", "lion_8bit", "paged_lion_8bit", "sgd", "rmsprop", "adagrad"),
    ],
)
def test_an_optimizer_that_is_set_is_that_of_a_file(name: str, tmp_path: Path) -> None:
    """With the implementation and the options of that optimizer, not those of Trainer's default or of the file."""
    for optim in (name, "paged_adamw_8bit"):
        text = f"model_name_or_path: {LLAMA}\nper_device_train_batch_size: 1\noptim: {optim}\n"
        (tmp_path / f"{optim}.yaml").write_text(text)
    published = "versions.transformers=v5.23"
    for_a_hub_id = load(LLAMA, [f"optim={name}"]).training
    in_a_file = load(tmp_path / f"{name}.yaml", [published]).training
    for_a_file = load(tmp_path / "paged_adamw_8bit.yaml", [published, f"optim={name}"]).training

    assert for_a_hub_id.model_dump(exclude={"versions"}) == in_a_file.model_dump(exclude={"versions"})
    assert for_a_file == in_a_file


def test_in_a_file_it_is_the_model_alone(tmp_path: Path) -> None:
    for key in ("preset", "hf_config"):
        path = tmp_path / f"{key}.yaml"
        path.write_text(f"{key}: {LLAMA}\ntraining: {{b: 2}}\n")
        spec = load(path)
        assert (spec.model.num_layers, spec.model.vocab_size) == (32, 128256)
        assert (spec.training.implementation, spec.training.recipe) == ("plain", "mixed-20")
        assert load("gpt2", [f"{key}={LLAMA}"]).model == spec.model
    assert memcalc.estimate({"preset": LLAMA}).parameters == 8_030_261_248


def test_importers_read_the_model_that_is_named(tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yml"
    path.write_text("base_model: Qwen/Qwen3-14B\nadapter: lora\nlora_r: 8\nsequence_len: 512\nmicro_batch_size: 1\n")
    spec = load(path)

    assert (spec.model.architecture, spec.model.num_layers, spec.model.hidden_size) == ("qwen3", 40, 5120)
    assert any("model Qwen/Qwen3-14B from memcalc's catalogue" in note for note in spec.origin.notes)


def test_overrides_and_other_models_apply() -> None:
    assert load(LLAMA, ["b=4", "recipe=amp"]).training.micro_batch_size == 4
    assert load(LLAMA, ["preset=gpt2"]).model.num_layers == 12
    assert load(LLAMA, ["num_layers=2"]).model.num_layers == 2


def test_models_published_in_fp32_train_in_fp32() -> None:
    training = load("openai-community/gpt2").training

    assert (training.recipe, training.attention) == ("fp32", "memory-efficient")  # flash attention takes no fp32
    assert load("openai-community/gpt2", ["bf16=true"]).training.recipe == "amp"
    assert load(LLAMA, ["bf16=true"]).training.recipe == "pure"  # the checkpoint is in bf16
    assert load(LLAMA, ["dtype=fp32"]).training.recipe == "fp32"


def test_a_file_of_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meta-llama").mkdir()
    (tmp_path / LLAMA).write_text("preset: gpt2\n")

    assert load(LLAMA).model.num_layers == 12


def test_a_directory_with_a_config_json_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my.model"
    folder.mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)

    for source in ("my.model", str(folder)):
        spec = load(source)
        assert (spec.name, spec.model.num_layers) == ("my.model", 3)
        assert any("read as a configuration of Hugging Face config.json" in note for note in spec.origin.notes)
    (tmp_path / "run.yaml").write_text("hf_config: my.model\n")
    assert load("run.yaml").model.num_layers == 3


def test_code_from_the_hub_is_never_run(tmp_path: Path) -> None:
    note = "internlm/internlm2-7b ships its own code (internlm2), which memcalc never runs. It is read as llama, which"
    assert any(note in each for each in load("internlm/internlm2-7b").origin.notes)
    config = {"model_type": "mystery", "auto_map": {"AutoModelForCausalLM": "modeling_mystery.Mystery"}}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(
        InputError, match=r"'mystery' is a model with its own code \(auto_map\), which memcalc never runs"
    ):
        load(tmp_path)


def test_activations_of_a_vision_tower_that_trains_are_a_limit_that_holds_memory() -> None:
    """Qwen2.5-VL-7B has 8,292,166,656 elements, 676,550,144 of them in its vision tower and projector."""
    result = memcalc.estimate("Qwen/Qwen2.5-VL-7B-Instruct", gpu="h100-80gb")

    assert result.parameters == 8_292_166_656
    assert result.verdict == "unknown"
    assert [limit.feature for limit in result.limits if limit.holds_memory] == [
        "activations of the vision tower and its projector"
    ]
    assert memcalc.estimate("Qwen/Qwen2.5-VL-7B-Instruct", "b=4", gpu="h100-80gb").verdict == "does-not-fit"
    assert memcalc.estimate("Qwen/Qwen2.5-VL-7B-Instruct", "vision_tower=frozen", gpu="h200").verdict == "fits"
