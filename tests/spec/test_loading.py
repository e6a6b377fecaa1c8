"""From what a user names to a Spec: files, presets, config.json, standard input, mappings."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from memcalc.errors import InputError
from memcalc.spec.loading import load
from tests.spec.files import SIZES, read


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
    assert spec.hardware.gpu is None  # a GPU belongs to a run, not to a model


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


def test_a_preset_that_is_set_takes_the_place_of_a_whole_model(tmp_path: Path) -> None:
    """Of a preset, a config.json and a file with sizes of its own; what a file adds to a model it names stays."""
    assert load("gpt2", ("preset=gpt2-xl",)).model == load("gpt2-xl").model
    assert load("gpt2", ("preset=gpt2-xl", "num_layers=3")).model.num_layers == 3

    (tmp_path / "own.yaml").write_text("model: {l: 2, d: 64, h: 4, V: 100}\ntraining: {b: 3}\n")
    spec = load(tmp_path / "own.yaml", ("preset=gpt2",))
    assert (spec.name, spec.model, spec.training.micro_batch_size) == ("gpt2", load("gpt2").model, 3)

    (tmp_path / "named.yaml").write_text("model: {preset: gpt2, l: 2}\n")
    assert load(tmp_path / "named.yaml", ("preset=gpt2-xl",)).model.num_layers == 2
