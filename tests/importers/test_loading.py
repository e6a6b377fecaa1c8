"""Reading: ours stays ours, every verb reads theirs, and no file makes a traceback."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc.checking.discovery import is_config
from memcalc.errors import InputError
from memcalc.importers.loading import import_file, list_config_json, load
from memcalc.importers.megatron.arguments import arguments_of
from memcalc.importers.models import preset_of
from memcalc.report.checks.text import HARMLESS
from memcalc.spec.presets import preset_names
from tests.properties.specs import examples

QLORA = "base_model: meta-llama/Llama-3.2-1B\nadapter: qlora\nload_in_4bit: true\nlora_r: 8\nsequence_len: 512\nmicro_batch_size: 1\nbf16: auto\n"
ROOT = Path(__file__).parents[2]
WHOSE = "read as a configuration of Hugging Face config.json (fields of transformers 5.23)"


@pytest.mark.parametrize(
    "path", [*sorted((ROOT / "configs").glob("*.yaml"))[:5], ROOT / "docs/examples/llama-3-70b-64xh100.yaml"]
)
def test_our_own_files_are_ours(path: Path) -> None:
    assert import_file(path) is None
    assert load(path).origin.notes == ()


def test_estimate_and_check_read_them(tmp_path: Path) -> None:
    path = tmp_path / "qlora.yml"
    path.write_text(QLORA)
    result = memcalc.estimate(path, gpu="h100-80gb")
    report = memcalc.check(tmp_path, gpu="h100-80gb")

    assert result.notes[0].startswith("read as a configuration of axolotl")
    assert result.spec.training.finetune == "qlora"
    assert [outcome.status for outcome in report.outcomes] == ["fits"]
    assert memcalc.load(memcalc.load(path), "b=2").origin.notes == result.spec.origin.notes


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yml", QLORA, True),
        ("b.yaml", "model_name_or_path: x\nper_device_train_batch_size: 1\n", True),
        ("c.yaml", "model_name_or_path: x\ntemplate: llama3\n", False),  # inference
        ("d.toml", '[model]\nname = "llama3"\nflavor = "8B"\n', True),
        ("e.toml", "[project]\nname = 'x'\n", False),
        ("f.sh", "python train.py --num-layers 2 --hidden-size 8\n", True),
        ("g.sh", "python train.py\n", False),
        ("ds_config.json", '{"zero_optimization": {"stage": 3}}', False),  # no model: only where it is named
        ("h.yaml", "checkpoint_dir: x\ntrain:\n  micro_batch_size: 1\n", True),
    ],
)
def test_which_files_of_a_directory_are_sized(name: str, text: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)

    assert is_config(str(tmp_path / name)) is expected


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("NousResearch/Meta-Llama-3.1-8B", "llama-3-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3-70b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("checkpoints/meta-llama/Meta-Llama-3-8B/", "llama-3-8b"),
        ("llama3-8B", "llama-3-8b"),
        ("microsoft/phi-1_5", "phi-1.5"),
        ("openai-community/gpt2", "gpt2"),
        ("someone/llama-3-9b", None),
        ("", None),
    ],
)
def test_names_of_models(name: str, preset: str | None) -> None:
    assert preset_of(name) == preset


def test_a_preset_is_found_by_its_own_name() -> None:
    assert [preset_of(name) for name in preset_names()] == preset_names()


def test_arguments_of_a_script() -> None:
    text = """
    A=4; export B="$((2*8))"  # --commented 1
    ARGS=( --num-layers ${A} --flag --pair 1 2 --hidden-size $B --name "${C:-x}" --rest $1 --eq=5 )
    """

    assert arguments_of(text) == {
        "num-layers": 4,
        "flag": True,
        "pair": [1, 2],
        "hidden-size": 16,
        "name": "x",  # one word in quotation marks is that word
        "rest": "$1",
        "eq": 5,
    }


@pytest.mark.parametrize(
    "text", ["A=$A\n--num-layers $A", "A=$B\nB=$A\n--x $A", "--" * 50_000, "A=" + "$A" * 10_000, "$((" * 20_000]
)
def test_a_script_cannot_hold_us_up(text: str) -> None:
    start = time.process_time()
    arguments_of(text)

    assert time.process_time() - start < 2


words = st.sampled_from(
    ["", "auto", "full_shard", "FSDP", "DEEPSPEED", "bf16", "lora", "a.json", "none", "stage", "enabled"]
)
scalars = st.none() | st.booleans() | st.integers(-5, 10**6) | st.floats(0, 1) | words
values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(words, scalars, max_size=3)
names = st.sampled_from(
    "base_model model_name_or_path micro_batch_size sequence_len optimizer optim adapter fsdp fsdp_config deepspeed bf16 "
    "per_device_train_batch_size lora_target lora_target_modules finetuning_type distributed_type mixed_precision "
    "deepspeed_config num_processes train checkpoint_dir devices precision quantize lora_r model trainer "
    "zero_optimization train_batch_size gradient_checkpointing torch_dtype".split()
)


@examples(60)
@given(st.dictionaries(names, values, max_size=10))
def test_no_content_is_a_traceback(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_text(json.dumps(data))
    try:
        load(path, ["preset=gpt2"])
    except InputError as error:
        assert error.problem  # noqa: PT017 -- most of this is refused, with a message


def test_the_keys_of_a_config_json_are_listed(tmp_path: Path) -> None:
    """What its family reads, what has no effect, and what nobody knows; null is silence."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "rope_scaling": {"factor": 8.0},
        "a_key_of_tomorrow": 3,
        "pretraining_tp": None,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = list_config_json(path)

    assert found is not None
    assert [key for key, _, _ in found.mapped] == [
        "model_type",
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
        "max_position_embeddings",
    ]
    assert [key for key, _ in found.no_effect] == ["architectures", "rms_norm_eps", "bos_token_id", "rope_scaling"]
    assert found.unknown == ("a_key_of_tomorrow",)
    assert load(path).origin.notes == (
        f"{WHOSE}: 6 mapped, 4 ignored (no effect on memory), 0 not modelled, 1 unknown.",
        "unknown, so not counted: a_key_of_tomorrow.",
        "no effect on memory: architectures, rms_norm_eps, bos_token_id, rope_scaling.",
    )
    assert load(path).origin.notes[-1].startswith(HARMLESS)  # not an annotation of a pull request


def test_files_of_gpt_neox_are_not_taken_for_others(tmp_path: Path) -> None:
    """GPT-NeoX files contain DeepSpeed's fields and Megatron-LM's names."""
    for number, text in enumerate(
        (
            '{"num_layers": 2, "hidden_size": 8, "pipe_parallel_size": 1, "train_micro_batch_size_per_gpu": 4}',
            '{"num-layers": 2, "hidden-size": 8, "pipe-parallel-size": 1, "train_micro_batch_size_per_gpu": 4}',
        )
    ):
        path = tmp_path / f"{number}.yml"
        path.write_text(text)
        found = import_file(path)
        assert found is not None
        assert found.framework.name == "GPT-NeoX"
