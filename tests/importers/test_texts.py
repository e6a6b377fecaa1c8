"""Where a configuration comes from and how it is written: standard input, merge keys, and what is wrong in its words."""

import io
import json
import sys
from pathlib import Path

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.importers.loading import list_config_json, load
from tests.importers.excerpts import DEEPSPEED, MEGATRON, QLORA, TORCHTITAN

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
LLAMA |= {"max_position_embeddings": 64}


def give(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


@pytest.mark.parametrize(
    ("text", "overrides", "whose"),
    [
        (QLORA, (), "axolotl"),
        (DEEPSPEED, ("preset=gpt2", "data_parallel=2"), "DeepSpeed"),
        (TORCHTITAN, (), "torchtitan"),
        (MEGATRON, (), "Megatron-LM"),
        (json.dumps(LLAMA), (), "Hugging Face config.json"),
    ],
)
def test_standard_input_may_be_anybodys(
    text: str, overrides: tuple[str, ...], whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, text)
    spec = load("-", overrides)

    assert spec.name == "unnamed"
    assert spec.origin.notes[0].startswith(f"read as a configuration of {whose} ")


def test_every_verb_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, QLORA)
    assert [outcome.status for outcome in memcalc.check("-", gpu="h100-80gb").outcomes] == ["fits"]
    give(monkeypatch, QLORA)
    assert len(memcalc.sweep("-", {"micro_batch_size": [1, 2]}).peak_bytes) == 2


def test_our_own_configuration_on_standard_input_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, "preset: gpt2\ntraining: {b: 2}\n")

    assert load("-").origin.notes == ()


def test_merge_keys_of_a_foreign_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text(
        f"base: &base\n  lora_r: 8\n  lora_alpha: 4\n<<: *base\n{QLORA.replace('lora_r: 16', 'lora_r: 64')}"
    )
    lora = load(path).training.lora

    assert lora is not None
    assert lora.rank == 64


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", '{"a": 1,', r"a\.json:2: this is not JSON: "),
        ("a.yaml", "a: [1", r"a\.yaml:2: this is not YAML: "),
        ("a.toml", "[a", r"a\.toml: this is not TOML: "),
        ("a.toml", "a = 1", r"a\.toml: the file is not a torchtitan config"),
        ("args.txt", "--lr 1", r"args\.txt: no command of the file starts a training"),
        ("a.sh", "python preprocess_data.py --num-layers 2", r"a\.sh: no command of the file starts a training"),
        ("b.sh", "trl vllm-serve --model gpt2", r"For another program's command: `memcalc dry-run --gpu"),
        ("config.json", '{"architectures": ["LlamaForCausalLM"]}', "model_type is missing"),
    ],
)
def test_what_is_wrong_is_said_in_the_files_own_words(name: str, text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)

    with pytest.raises(InputError, match=words):
        load(path)


def test_our_own_words_in_a_text_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "ours.txt"
    path.write_text("preset: gpt2\n")

    assert load(path).model.num_layers == 12


def test_what_a_config_json_has_beside_a_language_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    more = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1, "norm_topk_prob": True}
    path.write_text(json.dumps({**LLAMA, **more, "quantization_config": {"quant_method": "awq", "bits": 4}}))
    found = list_config_json(path)

    assert found is not None
    assert [key for key, _ in found.not_modelled] == ["architectures", "quantization_config"]
    assert found.unknown == ()
    assert any("LlamaForSequenceClassification, which has another head" in note for note in load(path).origin.notes)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "Gemma3ForConditionalGeneration"])
def test_classes_of_language_models(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "architectures": [name]}))
    found = list_config_json(path)

    assert found is not None
    assert found.not_modelled == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model_name_or_path: gpt2\nmax_length: 2048\nper_device_train_batch_size: 1\n",
            (
                "run.yaml: max_length (training.sequence_length): sequence_length = 2048 is longer than the 1024 learned "
                "positions. Set sequence_length: 1024 or less, or raise model.max_position_embeddings."
            ),
        ),
        (
            "model_name_or_path: gpt2\nper_device_train_batch_size: -3\nlora_r: 0\nuse_peft: true\n",
            (
                "run.yaml: lora_r (training.lora.rank): rank = 0 is too small. Set more than 0.\n"
                "run.yaml: per_device_train_batch_size (training.micro_batch_size): micro_batch_size = -3 is too small. "
                "Set more than 0."
            ),
        ),
    ],
)
def test_errors_of_values_name_the_fields_of_the_file(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        load("run.yaml", ("framework=sft",))

    assert sorted(str(caught.value).splitlines()) == message.splitlines()


def test_an_error_names_the_field_that_several_fields_decide(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model_name_or_path: gpt2\nper_device_train_batch_size: 1\noptim: adamwx\n")
    with pytest.raises(InputError, match="optim = 'adamwx' is not a supported value of Hugging Face"):
        load(tmp_path / "run.yaml")
