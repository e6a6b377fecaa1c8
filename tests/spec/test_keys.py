"""Keys of a configuration that are unknown, in the wrong block, given twice or missing: each refused on its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spec.files import SIZES, refusal


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model:\n  l: 4\n  hiden_size: 64\n",
            "run.yaml:3: model.hiden_size: unknown field 'hiden_size' in model. Did you mean hidden_size?",
        ),
        (
            f"model: {SIZES}\ntraining:\n  micro-batch-size: 4\n",
            (
                "run.yaml:3: training.micro-batch-size: unknown field 'micro-batch-size' in training. "
                "Did you mean micro_batch_size?"
            ),
        ),
        (
            "model:\n  moe:\n    num_expert: 8\n",
            "run.yaml:3: model.moe.num_expert: unknown field 'num_expert' in model.moe. Did you mean num_experts?",
        ),
        (
            f"model: {SIZES}\nhardware: {{zzz: 1}}\n",
            "run.yaml:2: hardware.zzz: unknown field 'zzz' in hardware. Choose from gpu.",
        ),
        (
            f"model: {SIZES}\ntraining: {{zzz: 1}}\n",
            "run.yaml:2: training.zzz: unknown field 'zzz' in training. `memcalc schema` lists all fields.",
        ),
        (
            f"model: {SIZES}\ntrainig: {{b: 2}}\n",
            "run.yaml:2: trainig: unknown field 'trainig'. Did you mean training?",
        ),
        (
            f"model: {SIZES}\nxyzzy: 1\n",
            (
                "run.yaml:2: xyzzy: unknown field 'xyzzy'. Choose from name, model, training, parallelism, hardware, "
                "inference, preset, hf_config."
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
            "run.yaml:1: model.b: b is a field of training, not of model. Move b below training:.",
        ),
        (
            f"model: {SIZES}\ntraining:\n  tensor_parallel: 2\n",
            (
                "run.yaml:3: training.tensor_parallel: tensor_parallel is a field of parallelism, not of training. "
                "Move tensor_parallel below parallelism:."
            ),
        ),
        (
            f"model: {SIZES}\nparallelism: {{gpu: t4}}\n",
            "run.yaml:2: parallelism.gpu: gpu is a field of hardware, not of parallelism. Move gpu below hardware:.",
        ),
        (f"model: {SIZES}\nb: 2\n", "run.yaml:2: b: 'b' is outside its block. Move b below training:."),
        (
            "num_layers: 3\n",
            "run.yaml:1: num_layers: 'num_layers' is outside its block. Move num_layers below model:.",
        ),
        (f"model: {SIZES}\ngpu: t4\n", "run.yaml:2: gpu: 'gpu' is outside its block. Move gpu below hardware:."),
    ],
)
def test_a_key_in_the_wrong_block_is_refused_with_the_right_one(folder: Path, text: str, message: str) -> None:
    assert refusal(folder, text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model:\n  l: 4\n  num_layers: 5\n",
            "run.yaml:3: model.num_layers: num_layers and l name the same field. Keep one of the two.",
        ),
        (
            f"model: {SIZES}\ntraining:\n  micro_batch_size: 4\n  b: 5\n",
            "run.yaml:4: training.b: b and micro_batch_size name the same field. Keep one of the two.",
        ),
        (
            "model:\n  num_layers: 4\n  d: 64\n  num_layers: 5\n",
            "run.yaml:4: model.num_layers: the key 'num_layers' is repeated, first on line 2. Keep one of the two.",
        ),
        (
            f"model: {SIZES}\ntraining: {{b: 2}}\ntraining: {{s: 8}}\n",
            "run.yaml:3: training: the key 'training' is repeated, first on line 2. Keep one of the two.",
        ),
        (
            "preset: gpt3\nmodel:\n  preset: gpt2\n",
            "run.yaml:3: model.preset: preset is set twice, inside and outside the block model. Keep one of the two.",
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
        f"run.yaml:{line}: {block}: {value} is not a block of fields. "
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
        f"run.yaml:{line}: model.{field}: {field} is required and cannot be derived from other fields. Add a line "
        f"`{field}: ...`."
    )


def test_heads_that_do_not_divide_are_refused_on_their_line(folder: Path) -> None:
    assert refusal(folder, "model:\n  l: 4\n  d: 66\n  h: 4\n  V: 100\n") == (
        "run.yaml:4: model.num_attention_heads: num_attention_heads = 4 does not divide hidden_size = 66. Set "
        "num_attention_heads to a divisor, such as 3, or set head_dim."
    )


def test_an_unknown_family_is_refused_on_its_line(folder: Path) -> None:
    message = refusal(folder, "model:\n  architecture: lama\n")

    assert message.startswith("run.yaml:2: model.architecture: memcalc has no formulas for the model family 'lama'.")
    assert "Nearest: llama," in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("training:\n  dropout: .nan\n", "training.dropout: .nan is not a finite number. Write a plain number."),
        ("training:\n  dropout: 1e400\n", "training.dropout: 1e400 is not a finite number. Write a plain number."),
        (
            "hardware:\n  gpu: 2024-01-01\n",
            (
                "hardware.gpu: 'timestamp' is not a type of value that a configuration has. "
                "Use plain mappings, lists, numbers, words, true and false."
            ),
        ),
    ],
)
def test_values_that_yaml_knows_and_we_do_not_are_refused_on_their_line(folder: Path, text: str, problem: str) -> None:
    assert refusal(folder, f"model: {SIZES}\n{text}") == f"run.yaml:3: {problem}"
