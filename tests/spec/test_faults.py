"""All faults of a file are reported at once, as linters do: unknown keys, values, rules, the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from memcalc.errors import InputError, InputErrors
from memcalc.spec.loading import load
from tests.cli.conftest import Run, run  # noqa: F401 -- a fixture

SIX = """\
preset: llama-3-8b
training:
  micro_batch_sizee: 2
  recompute: maybe
  sequence_length: -3
  lr: 0.001
parallelism:
  tensor_parallel: 7
hardware:
  gpu: a100
"""
MESSAGES = [
    "six.yaml:3: training.micro_batch_sizee: unknown field 'micro_batch_sizee' in training. Did you mean",
    "six.yaml:4: training.recompute: recompute = 'maybe' is not a valid value. Write none, selective, full,",
    "six.yaml:5: training.sequence_length: sequence_length = -3 is too small. Set more than 0.",
    "six.yaml:6: training.lr: unknown field 'lr' in training. Leave lr out: the field has no effect on memory.",
    "six.yaml:8: parallelism.tensor_parallel: tensor_parallel = 7 does not divide num_attention_heads = 32.",
    "six.yaml:10: hardware.gpu: 'a100' is sold with 40 or 80 GB of memory. Write a100-40gb or a100-80gb.",
]


def faults(folder: Path, text: str, *overrides: str) -> list[str]:
    """The messages, with paths relative to `folder`; each names the file by the path that was given."""
    path = folder / "six.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load(path, overrides)
    messages = str(caught.value).splitlines()
    assert all(message.startswith((f"{path}:", "--")) for message in messages)
    return [message.replace(f"{folder}/", "") for message in messages]


def test_a_file_with_six_faults_has_six_messages_in_the_order_of_its_lines(tmp_path: Path) -> None:
    found = faults(tmp_path, SIX)

    assert len(found) == 6
    assert all(message.startswith(begin) for message, begin in zip(found, MESSAGES, strict=True))


def test_each_is_a_line_on_standard_error(tmp_path: Path, run: Callable[..., Run]) -> None:  # noqa: F811
    (tmp_path / "six.yaml").write_text(SIX)
    done = run("estimate", str(tmp_path / "six.yaml"))

    assert (done.code, done.out) == (2, "")
    assert [line.startswith(f"error: {tmp_path}/six.yaml:") for line in done.err.splitlines()] == [True] * 6


def test_a_missing_model_hides_no_other_fault(tmp_path: Path) -> None:
    found = faults(tmp_path, SIX.replace("llama-3-8b", "lama-3-8b"))

    assert [line.partition(": ")[0] for line in found] == [
        "six.yaml:1",
        "six.yaml:3",
        "six.yaml:4",
        "six.yaml:5",
        "six.yaml:6",
    ]
    assert "Did you mean llama-3-8b?" in found[0]


def test_wrong_sizes_are_reported_and_not_what_derives_from_them(tmp_path: Path) -> None:
    """num_key_value_heads derives from num_attention_heads: without this number it is missing, by no fault of its own."""
    found = faults(tmp_path, "model: {l: 4, d: -5, h: twelve, V: 100, n_hed: 3}\ntraining: {dtype: bf17}\n")

    assert [line.partition(" is ")[0].partition(": ")[2] for line in found] == [
        "model.n_hed: unknown field 'n_hed' in model. Did you mean n_head?",
        "model.hidden_size: hidden_size = -5",
        "model.num_attention_heads: num_attention_heads = 'twelve'",
        "training.dtype: dtype = 'bf17'",
    ]


def test_one_fault_has_one_message(tmp_path: Path) -> None:
    """A size that is misspelled is not told to be missing, too, and a rule of a wrong value is not checked."""
    assert len(faults(tmp_path, "model: {l: 4, hiden_size: 64, h: 4, V: 100}\n")) == 1
    assert len(faults(tmp_path, "model: {l: 4, d: 64}\n")) == 1
    assert len(faults(tmp_path, "preset: gpt2\nparallelism: {tensor_parallel: -1, zero_stage: 1, engine: ddp}\n")) == 1
    assert len(faults(tmp_path, "preset: gpt2\nparallelism: {gpus: two}\n")) == 1


def test_overrides_are_reported_with_the_file(tmp_path: Path) -> None:
    found = faults(tmp_path, "preset: gpt2\ntraining: {zzz: 1}\n", "b=0")

    assert found[1].startswith("six.yaml:2: training.zzz: unknown field 'zzz' in training.")
    assert found[0] == "--set: training.micro_batch_size: micro_batch_size = 0 is too small. Set more than 0."


def test_the_error_of_several_is_that_of_the_first_for_programs(tmp_path: Path) -> None:
    path = tmp_path / "six.yaml"
    path.write_text(SIX)
    with pytest.raises(InputErrors) as caught:
        load(path)

    assert len(caught.value.errors) == 6
    assert caught.value.exit_code == 2
    assert caught.value.location == f"{path}:3: training.micro_batch_sizee"
