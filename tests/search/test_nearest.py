"""The nearest fit: what is printed, written after the run's own --set, gives what was promised."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

import memcalc
from memcalc.api.sources import run_of
from memcalc.errors import InputError
from memcalc.search.result import FitResult
from memcalc.suggestions.run_overrides import overrides_to
from tests.properties.specs import examples

CARDS = ("l4", "t4", "rtx-4090", "a100-40gb", "h100-80gb")

SETTINGS: tuple[tuple[tuple[str, ...], ...], ...] = (
    ((), ("implementation=huggingface",), ("implementation=megatron",), ("implementation=torchtitan",)),
    ((), ("recipe=pure",), ("recipe=mixed-16",), ("recipe=amp",), ("dtype=fp16",)),
    ((), ("data_parallel=8",), ("data_parallel=8", "zero_stage=2"), ("data_parallel=4", "zero_stage=3"),
     ("tensor_parallel=2",), ("global_batch_size=64", "data_parallel=8")),
    ((), ("b=4",), ("gradient_accumulation_steps=4",)),
    ((), ("attention=eager",), ("finetune=lora",), ("optimizer=sgd",), ("recompute=full",)),
)  # fmt: skip


def settings() -> st.SearchStrategy[tuple[str, ...]]:
    return st.tuples(*map(st.sampled_from, SETTINGS)).map(lambda parts: tuple(word for part in parts for word in part))


def pasted_as_promised(answer: FitResult, source: Any, words: Sequence[str], gpu: str) -> None:
    """Each change, over the same command."""
    for found in answer.smallest_changes:
        change = found.change
        card = None if any(word.startswith("hardware.gpu=") for word in change.overrides) else gpu
        after = memcalc.estimate(source, *words, *change.overrides, gpu=card)
        assert after.headline.device_bytes == change.needed, change.overrides
        assert after.fits


@examples(2)
@given(
    st.sampled_from(["llama-3-8b", "llama-2-13b", "qwen2.5-7b", "mixtral-8x7b", "gpt2-xl"]),
    settings(),
    st.sampled_from(CARDS),
    st.sampled_from([None, 8]),
)
def test_what_is_printed_can_be_pasted(name: str, words: tuple[str, ...], card: str, gpus: int | None) -> None:
    try:
        answer = memcalc.fit(name, *words, gpu=card, gpus=gpus)
    except InputError:
        reject()
    pasted_as_promised(answer, name, words, card)


@pytest.mark.parametrize(
    ("name", "words", "card", "gpus"),
    [
        ("llama-3-8b", ("l=12", "implementation=huggingface"), "l4", None),
        pytest.param(
            *("llama-2-13b", ("implementation=huggingface", "data_parallel=64"), "a100-40gb", None),
            marks=pytest.mark.long,
        ),
        pytest.param("llama-3-8b", ("global_batch_size=64",), "l4", 8, marks=pytest.mark.long),
    ],
)
def test_defaults_that_move_with_a_change(name: str, words: tuple[str, ...], card: str, gpus: int | None) -> None:
    """Adapters are over pure weights by default, full training is not."""
    answer = memcalc.fit(name, *words, gpu=card, gpus=gpus)

    assert answer.smallest_changes
    pasted_as_promised(answer, name, words, card)


def test_changes_of_the_run_with_all_layers_recomputed() -> None:
    """The run does not fit either: `recompute` says so, with what it needs then."""
    words = ("l=4", "recipe=mixed-16")
    answer = memcalc.fit("llama-3.2-1b", *words, gpu="t4", minimize="recompute")
    full = memcalc.estimate("llama-3.2-1b", *words, "recompute=full", gpu="t4")

    assert answer.least_recompute is None
    assert not answer.fits
    assert answer.all_recomputed is not None
    assert answer.all_recomputed.headline.device_bytes == full.headline.device_bytes
    assert answer.smallest_changes
    for found in answer.smallest_changes:
        assert "training.recompute=full" in found.change.overrides
        assert found.change.spec.training.recompute == "full"
        assert found.change.fits
    pasted_as_promised(answer, "llama-3.2-1b", words, "t4")


@pytest.mark.long
def test_a_configuration_of_another_framework(tmp_path: Path) -> None:
    """It does not say over how many GPUs: the question does, and so do the changes."""
    path = tmp_path / "ds.json"
    path.write_text(
        '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 8}'
    )
    words = ("preset=llama-3-8b",)
    answer = memcalc.fit(path, *words, gpu="l4", gpus=8)

    assert answer.unchanged is not None
    assert answer.unchanged.spec.parallelism.data_parallel == 8
    assert answer.smallest_changes
    assert all(any("data_parallel=" in word for word in found.change.overrides) for found in answer.smallest_changes)
    pasted_as_promised(answer, path, words, "l4")
    fewest = memcalc.fit(path, *words, gpu="h100-80gb", minimize="gpus").fewest
    assert fewest == memcalc.fit(path, *words, gpu="h100-80gb", minimize="gpus", gpus=64).fewest
    with pytest.raises(InputError, match="does not set the number of GPUs"):
        memcalc.fit(path, *words, gpu="l4")


@pytest.mark.parametrize("text", ["preset: llama-3.2-1b\ntraining: {implementation: huggingface}\n"])
def test_standard_input_is_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    import io
    import sys

    path = tmp_path / "run.yaml"
    path.write_text(text)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    answer = memcalc.fit("-", gpu="l4")

    assert answer.smallest_changes
    pasted_as_promised(answer, path, (), "l4")


def test_words_that_lead_to_another_run() -> None:
    run = run_of("llama-3-8b", "implementation=huggingface", verb="fit")
    target = memcalc.load("llama-3-8b", "implementation=huggingface", "finetune=qlora", "recipe=mixed-20")
    words = overrides_to(run, target)

    assert run.changed(words) == target
    assert "training.recipe=mixed-20" in words
    assert overrides_to(run, run.spec) == ()


def test_changes_of_another_frameworks_file_can_be_pasted(tmp_path: Path) -> None:
    """What torchtitan's file comes to depends on the ranks beside it: its own modules are for FSDP2 on several."""
    path = tmp_path / "8B.toml"
    path.write_text('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 4\nseq_len = 8192\n')
    given = ("zero_stage=2",)
    found = memcalc.fit(path, *given, gpu="mi300x").smallest_changes

    assert found
    for each in found:
        pasted = memcalc.estimate(path, *given, *each.change.overrides, "gpu=mi300x")
        assert pasted.headline.device_bytes == each.change.needed, each.change.overrides
