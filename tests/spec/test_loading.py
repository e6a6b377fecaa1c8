"""From what a user names to a Spec: files, presets, config.json, standard input, mappings, and their mistakes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.spec.loading import load
from memcalc.spec.spec import Spec
from memcalc.spec.yaml_source import MAX_CHARACTERS

SIZES = "{l: 4, d: 64, h: 4, V: 100}"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-05,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of configurations that is not the one commands run in."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "config.json").write_text(json.dumps(LLAMA))
    (runs / "models").mkdir()
    (runs / "models" / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 5}))
    return runs


def read(folder: Path, text: str | bytes, *overrides: str, name: str = "run.yaml") -> Spec:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(file, overrides)


def refusal(folder: Path, text: str | bytes, *overrides: str, name: str = "run.yaml") -> str:
    """The whole message, which always has a remedy."""
    with pytest.raises(InputError) as caught:
        read(folder, text, *overrides, name=name)
    assert caught.value.remedy
    assert caught.value.exit_code == 2
    return str(caught.value)


# -- the ways to name a configuration ----------------------------------------------------------------------------------


def test_a_file_is_read_and_names_the_run(folder: Path) -> None:
    spec = read(folder, f"model: {SIZES}\ntraining: {{b: 2}}\n", name="small.yaml")

    assert (spec.name, spec.model.num_layers, spec.training.micro_batch_size) == ("small", 4, 2)
    assert read(folder, f"name: mine\nmodel: {SIZES}\n").name == "mine"


@pytest.mark.parametrize("source", ["gpt2", "gpt2.yaml"])
def test_a_preset_is_found_by_its_name(folder: Path, source: str) -> None:
    assert load(source).model.hidden_size == 768


def test_a_file_goes_before_the_preset_of_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "gpt2.yaml").write_text(f"model: {SIZES}\n")
    monkeypatch.chdir(folder)

    assert load("gpt2.yaml").model.hidden_size == 64
    assert load("gpt2").model.hidden_size == 768


def test_standard_input_is_a_dash(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def feed(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    feed(f"model: {SIZES}\n".encode())
    spec = load("-")
    assert (spec.name, spec.model.hidden_size) == ("unnamed", 64)
    feed(b"model: {l: 4\n")
    with pytest.raises(InputError, match=r"^standard input:2: this is not YAML"):
        load("-")
    feed(b"\xff")
    with pytest.raises(InputError, match=r"^standard input: byte 0 is not UTF-8 text"):
        load("-")


def test_a_mapping_is_a_configuration(folder: Path) -> None:
    given = {"model": {"l": 4, "d": 64, "h": 4, "V": 100}, "training": {"b": 2}}
    spec = load(given)

    assert spec.name == "unnamed"
    assert spec.model == read(folder, f"model: {SIZES}\n").model
    assert given["model"] == {"l": 4, "d": 64, "h": 4, "V": 100}


def test_a_hugging_face_config_is_a_configuration(folder: Path) -> None:
    """Read as it is, under its own name, with --set on top."""
    spec = load(folder / "config.json", ["b=2", "l=2"])

    assert spec.name == "config"
    assert (spec.model.architecture, spec.model.num_layers, spec.model.num_key_value_heads) == ("llama", 2, 2)
    assert (spec.training.micro_batch_size, spec.training.sequence_length) == (2, 128)


@pytest.mark.parametrize(
    "text",
    [
        "hf_config: config.json",
        "model: {hf_config: config.json}",
        "hf_config: ./config.json",
        "hf_config: models/../config.json",
        "hf_config: config.json\nmodel:\n",
    ],
)
def test_hf_config_stands_beside_or_inside_model(folder: Path, text: str) -> None:
    """Its path is relative to the file that names it, wherever the command runs."""
    assert read(folder, text).model == load(folder / "config.json").model


def test_an_absolute_hf_config_is_found_too(folder: Path) -> None:
    assert read(folder, f"hf_config: {folder / 'models' / 'config.json'}").model.num_layers == 5


@pytest.mark.parametrize("text", ["preset: gpt2", "model: {preset: gpt2}", "preset: gpt2.yaml"])
def test_preset_stands_beside_or_inside_model(folder: Path, text: str) -> None:
    assert read(folder, text).model == load("gpt2").model


def test_a_configuration_beside_this_one_is_a_preset_too(folder: Path) -> None:
    """It brings its training block, as gpt3's does; the file's own fields go over both."""
    (folder / "base.yaml").write_text(f"model: {SIZES}\ntraining: {{b: 7, s: 64}}\nhardware: {{gpu: t4}}\n")
    spec = read(folder, "preset: base.yaml\nmodel: {l: 2}\ntraining: {s: 32}\n")

    assert (spec.model.num_layers, spec.model.hidden_size) == (2, 64)
    assert (spec.training.micro_batch_size, spec.training.sequence_length) == (7, 32)
    assert spec.hardware.gpu is None  # a card belongs to a run, not to a model


def test_gpt3_brings_the_published_training_block(folder: Path) -> None:
    spec = read(folder, "preset: gpt3\ntraining: {b: 4}\n")

    assert spec.training.attention == "eager"
    assert (spec.training.dropout, spec.training.micro_batch_size) == (0.1, 4)


def test_fields_of_the_model_go_over_what_it_is_based_on(folder: Path) -> None:
    """Nested blocks field by field: Mixtral with 4 experts keeps its 2 a token."""
    spec = read(folder, "preset: mixtral-8x7b\nmodel:\n  l: 2\n  moe: {num_experts: 4}\n")

    assert spec.model.moe is not None
    assert (spec.model.num_layers, spec.model.moe.num_experts, spec.model.moe.num_experts_per_token) == (2, 4, 2)


def test_sizes_that_follow_are_rescaled_with_a_preset(folder: Path) -> None:
    """GPT-2 with d = 1536: heads of 1536 / 12 = 128, an MLP of 4 x 1536 = 6144."""
    model = read(folder, "preset: gpt2\nmodel: {d: 1536}\n").model

    assert (model.head_dim, model.intermediate_size) == (128, 6144)


@pytest.mark.parametrize("symbols", [True, False])
def test_each_symbol_is_the_name_of_its_field(folder: Path, symbols: bool) -> None:
    names = ("l", "d", "h", "V", "b", "s")
    if not symbols:
        names = (
            *("num_layers", "hidden_size", "num_attention_heads", "vocab_size"),
            *("micro_batch_size", "sequence_length"),
        )
    l, d, h, V, b, s = names  # noqa: E741, N806 -- the papers' symbols
    spec = read(folder, f"model: {{{l}: 3, {d}: 60, {h}: 5, {V}: 90}}\ntraining: {{{b}: 2, {s}: 33}}\n")

    assert (spec.model.num_layers, spec.model.hidden_size) == (3, 60)
    assert (spec.model.num_attention_heads, spec.model.vocab_size) == (5, 90)
    assert (spec.training.micro_batch_size, spec.training.sequence_length) == (2, 33)


def test_a_mark_of_byte_order_and_windows_line_ends_do_not_matter(folder: Path) -> None:
    assert (
        read(
            folder, b"\xef\xbb\xbfmodel: {l: 4, d: 64, h: 4, V: 100}\r\ntraining:\r\n  b: 2\r\n"
        ).training.micro_batch_size
        == 2
    )


# -- what is no configuration ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it holds no configuration."),
        ("# only a comment\n", "it holds no configuration."),
        ("{}", "it holds no configuration."),
        ("null", "it holds no configuration."),
        ("42", "it holds 42, not a configuration."),
        ("hello", "it holds 'hello', not a configuration."),
        ("[1, 2]", "it holds a list, not a configuration."),
    ],
)
def test_a_file_without_blocks_is_refused(folder: Path, text: str, problem: str) -> None:
    remedy = "Write at least a `model:` block; `memcalc models` lists presets to start from."

    assert refusal(folder, text) == f"run.yaml: {problem} {remedy}"


@pytest.mark.parametrize(
    ("data", "byte"), [(b"\xff\xfe\x00", 0), (b"name: \xe9\n", 6), ("model: {}".encode("utf-16"), 0)]
)
def test_a_file_that_is_not_utf_8_is_refused(folder: Path, data: bytes, byte: int) -> None:
    message = f"run.yaml: byte {byte} is not UTF-8 text. A configuration is a text file in UTF-8."

    assert refusal(folder, data) == message


def test_a_huge_file_is_refused_without_being_read_as_a_whole(folder: Path) -> None:
    """Five million characters: at most four bytes for each of the million that a configuration may have are read."""
    assert refusal(folder, "#" * (5 * MAX_CHARACTERS)) == (
        "run.yaml: the file has 4,000,001 characters; a configuration has at most 1,000,000. "
        "Name the configuration file itself."
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nope", "nope: there is no such file and no preset of that name. `memcalc models` lists the presets."),
        ("gpt33", "gpt33: there is no such file and no preset of that name. Did you mean gpt3?"),
        (
            "lama-3-8b.yaml",
            "lama-3-8b.yaml: there is no such file and no preset of that name. Did you mean llama-3-8b?",
        ),
        ("x/gpt3", "x/gpt3: there is no such file and no preset of that name. Did you mean gpt3?"),
        (".", ".: . is a directory. Name a file in it, or size them all with `memcalc check`."),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(folder: Path, source: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(source)

    assert str(caught.value) == message


@pytest.mark.parametrize("source", ["a" * 5000, "gpt3\0", "../" * 2000 + "x", "\udce9"])
def test_a_name_that_no_system_can_look_up_is_refused(folder: Path, source: str) -> None:
    with pytest.raises(InputError, match="there is no such file and no preset of that name"):
        load(source)


def test_a_file_that_may_not_be_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "secret.yaml"
    file.write_text(f"model: {SIZES}\n")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError) as caught:
        load(file)

    assert str(caught.value) == f"{file}: it cannot be read: Permission denied. Check the path and its rights."


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model:\n  l: 4\n  hiden_size: 64\n",
            "run.yaml:3: model.hiden_size: 'hiden_size' is no field of model. Did you mean hidden_size?",
        ),
        (
            f"model: {SIZES}\ntraining:\n  micro-batch-size: 4\n",
            (
                "run.yaml:3: training.micro-batch-size: 'micro-batch-size' is no field of training. "
                "Did you mean micro_batch_size?"
            ),
        ),
        (
            "model:\n  moe:\n    num_expert: 8\n",
            "run.yaml:3: model.moe.num_expert: 'num_expert' is no field of model.moe. Did you mean num_experts?",
        ),
        (
            f"model: {SIZES}\nhardware: {{zzz: 1}}\n",
            "run.yaml:2: hardware.zzz: 'zzz' is no field of hardware. Known are gpu.",
        ),
        (
            f"model: {SIZES}\ntrainig: {{b: 2}}\n",
            "run.yaml:2: trainig: 'trainig' is no field of a configuration. Did you mean training?",
        ),
        (
            f"model: {SIZES}\nxyzzy: 1\n",
            (
                "run.yaml:2: xyzzy: 'xyzzy' is no field of a configuration. "
                "Known are name, model, training, parallelism, hardware, preset, hf_config."
            ),
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(folder: Path, text: str, message: str) -> None:
    assert refusal(folder, text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: {l: 4, d: 64, h: 4, V: 100, b: 2}\n",
            "run.yaml:1: model.b: 'b' is no field of model; it belongs to training. Move it to training:.",
        ),
        (
            f"model: {SIZES}\ntraining:\n  tensor_parallel: 2\n",
            (
                "run.yaml:3: training.tensor_parallel: 'tensor_parallel' is no field of training; "
                "it belongs to parallelism. Move it to parallelism:."
            ),
        ),
        (
            f"model: {SIZES}\nparallelism: {{gpu: t4}}\n",
            "run.yaml:2: parallelism.gpu: 'gpu' is no field of parallelism; it belongs to hardware. Move it to hardware:.",
        ),
        (f"model: {SIZES}\nb: 2\n", "run.yaml:2: b: 'b' stands outside its block. Move it below training:."),
        (
            "num_layers: 3\n",
            "run.yaml:1: num_layers: 'num_layers' stands outside its block. Move it below model:.",
        ),
        (f"model: {SIZES}\ngpu: t4\n", "run.yaml:2: gpu: 'gpu' stands outside its block. Move it below hardware:."),
    ],
)
def test_a_key_in_the_wrong_block_is_refused_with_the_right_one(folder: Path, text: str, message: str) -> None:
    assert refusal(folder, text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model:\n  l: 4\n  num_layers: 5\n",
            "run.yaml:3: model.num_layers: num_layers and l are one field. Keep one of the two.",
        ),
        (
            f"model: {SIZES}\ntraining:\n  micro_batch_size: 4\n  b: 5\n",
            "run.yaml:4: training.b: b and micro_batch_size are one field. Keep one of the two.",
        ),
        (
            "model:\n  num_layers: 4\n  d: 64\n  num_layers: 5\n",
            "run.yaml:4: model.num_layers: the key 'num_layers' stands twice, first on line 2. Keep one of the two.",
        ),
        (
            f"model: {SIZES}\ntraining: {{b: 2}}\ntraining: {{s: 8}}\n",
            "run.yaml:3: training: the key 'training' stands twice, first on line 2. Keep one of the two.",
        ),
        (
            "preset: gpt3\nmodel:\n  preset: gpt2\n",
            "run.yaml:3: model.preset: preset is given twice, beside and inside model. Keep one of the two.",
        ),
    ],
)
def test_a_field_that_is_given_twice_is_refused(folder: Path, text: str, message: str) -> None:
    assert refusal(folder, text) == message


@pytest.mark.parametrize(
    ("text", "block", "value"),
    [
        ("model: 3\n", "model", "3"),
        (f"model: {SIZES}\nhardware: a100-80gb\n", "hardware", "'a100-80gb'"),
        (f"model: {SIZES}\ntraining: [1]\n", "training", "a list"),
        (f"model: {SIZES}\nparallelism: true\n", "parallelism", "True"),
    ],
)
def test_a_block_that_is_none_is_refused(folder: Path, text: str, block: str, value: str) -> None:
    line = text.count("\n")

    assert refusal(folder, text) == (
        f"run.yaml:{line}: {block}: {value} stands where a block of fields is expected. "
        f"Write `{block}:` and its fields indented below it."
    )


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        ("model:\n", 1, "num_layers"),
        ("name: x\ntraining: {b: 2}\n", 1, "num_layers"),
        ("name: x\nmodel: {l: 4}\n", 2, "hidden_size"),
        ("model: {l: 4, d: 64, h: 4}\n", 1, "vocab_size"),
    ],
)
def test_a_size_that_nothing_tells_is_asked_for(folder: Path, text: str, line: int, field: str) -> None:
    assert refusal(folder, text) == (
        f"run.yaml:{line}: model.{field}: {field} is missing, and nothing else tells it. Add a line `{field}: ...`."
    )


def test_heads_that_do_not_divide_are_refused_on_their_line(folder: Path) -> None:
    assert refusal(folder, "model:\n  l: 4\n  d: 66\n  h: 4\n  V: 100\n") == (
        "run.yaml:4: model.num_attention_heads: num_attention_heads = 4 does not divide hidden_size = 66. "
        "Give a number of heads that divides it, such as 3, or set head_dim."
    )


def test_an_unknown_family_is_refused_on_its_line(folder: Path) -> None:
    message = refusal(folder, "model:\n  architecture: lama\n")

    assert message.startswith("run.yaml:2: model.architecture: 'lama' is not a model family that memcalc knows.")
    assert "Nearest: llama," in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("training:\n  dropout: .nan\n", "training.dropout: .nan is not a finite number. Write a plain number."),
        ("training:\n  dropout: 1e400\n", "training.dropout: 1e400 is not a finite number. Write a plain number."),
        (
            "hardware:\n  gpu: 2024-01-01\n",
            (
                "hardware.gpu: 'timestamp' is a kind of value that a configuration does not have. "
                "Use plain mappings, lists, numbers, words, true and false."
            ),
        ),
    ],
)
def test_values_that_yaml_knows_and_we_do_not_are_refused_on_their_line(folder: Path, text: str, problem: str) -> None:
    assert refusal(folder, f"model: {SIZES}\n{text}") == f"run.yaml:3: {problem}"


# -- what a model is based on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["preset", "hf_config"])
@pytest.mark.parametrize(
    ("name", "rest"),
    [
        (
            "nope.json",
            "nope.json: there is no such file and no preset of that name. `memcalc models` lists the presets.",
        ),
        ("gpt33", "gpt33: there is no such file and no preset of that name. Did you mean gpt3?"),
        ("[gpt3]", "{key} = a list is not a name. Write a path or the name of a preset."),
        ("3", "{key} = 3 is not a name. Write a path or the name of a preset."),
        (".", ".: . is a directory. Name a file in it, or size them all with `memcalc check`."),
    ],
)
def test_a_base_that_is_not_there_is_refused_where_it_is_named(folder: Path, key: str, name: str, rest: str) -> None:
    message = refusal(folder, f"name: x\n{key}: {name}\n")

    assert message == f"run.yaml:2: {key}: {rest.format(key=key)}"


def test_preset_and_hf_config_exclude_each_other(folder: Path) -> None:
    message = refusal(folder, "preset: gpt3\nhf_config: config.json\n")

    assert message == "run.yaml:1: preset: preset and hf_config are both given. Keep one of the two."


@pytest.mark.parametrize("name", ["run.yaml", "chain.yaml"])
def test_a_base_that_is_based_on_another_is_refused(folder: Path, name: str) -> None:
    """Above all a file that is based on itself."""
    (folder / "chain.yaml").write_text("preset: gpt2\n")
    message = refusal(folder, f"preset: {name}\n")

    assert message == f"run.yaml:1: preset: {name} refers to yet another configuration. Name that one directly."


def test_an_error_in_the_base_names_both_files(folder: Path) -> None:
    (folder / "bad.json").write_text(json.dumps(LLAMA | {"vocab_size": "x"}))
    (folder / "bad.yaml").write_text("model:\n  l: 4\n  l: 5\n")

    assert refusal(folder, "name: x\nhf_config: bad.json\n") == (
        "run.yaml:2: hf_config: bad.json: vocab_size: 'x' is not a whole number from 1 to 2^40. "
        "Write the size as digits, without quotes."
    )
    assert refusal(folder, "preset: bad.yaml\n") == (
        "run.yaml:1: preset: bad.yaml:3: model.l: the key 'l' stands twice, first on line 2. Keep one of the two."
    )


def test_a_config_json_of_no_known_family_is_refused(folder: Path) -> None:
    message = refusal(folder, json.dumps(LLAMA | {"model_type": "lama"}), name="their.json")

    assert message.startswith("their.json: model_type: 'lama' is not a model family that memcalc knows.")


def test_a_config_json_without_a_model_type_is_told_what_is_missing(folder: Path) -> None:
    """As a configuration it is unreadable, and the first key that stands outside a block says why."""
    without = {key: value for key, value in LLAMA.items() if key != "model_type"}

    assert refusal(folder, json.dumps(without, indent=1), name="their.json") == (
        "their.json:2: hidden_size: 'hidden_size' stands outside its block. Move it below model:."
    )


# -- all together ------------------------------------------------------------------------------------------------------


def test_the_file_of_the_interface_loads(folder: Path) -> None:
    """GPT-3 as INTERFACE writes it down, every field spelled out."""
    spec = read(
        folder,
        """
name: gpt3-175b
model:
  architecture: gpt3
  num_layers: 96
  hidden_size: 12288
  num_attention_heads: 96
  num_key_value_heads: 96
  head_dim:
  intermediate_size:
  vocab_size: 50257
  max_position_embeddings: 2048
  position_embedding: learned
  normalization: layernorm
  norms_per_layer: 2
  mlp: gelu
  qkv_bias: true
  output_bias: true
  mlp_bias: true
  lm_head_bias: false
  qk_norm: false
  tie_word_embeddings: true
  parallel_block: false
training:
  micro_batch_size: 1
  sequence_length: 2048
  gradient_accumulation_steps: 1
  global_batch_size:
  dtype: bf16
  recipe: mixed-20
  implementation: plain
  optimizer: adamw
  optimizer_implementation: foreach
  zero_grad: set_to_none
  recompute: none
  attention: eager
  dropout: 0.1
  loss: materialized
  finetune: full
parallelism:
  engine:
  data_parallel: 1
  tensor_parallel: 1
  pipeline_parallel: 1
  context_parallel: 1
  expert_parallel: 1
  sequence_parallel: false
  zero_stage: 0
hardware:
  gpu: a100-80gb
""",
    )

    assert spec.name == "gpt3-175b"
    assert spec.model.head_dim == 128
    assert spec == load("gpt3", ["name=gpt3-175b"], gpu="a100-80gb")
