"""Megatron-LM's words for matmuls in 8 bits."""

from pathlib import Path

import pytest

import memcalc

ARGUMENTS = (
    "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 2048 --seq-length 256 --vocab-size 1024 "
    "--max-position-embeddings 256 --micro-batch-size 1 --bf16 --fp8-format hybrid --fp8-amax-history-len 1024"
)


def read(tmp_path: Path, words: str, *overrides: str) -> memcalc.Spec:
    script = tmp_path / "train.sh"
    script.write_text(f"torchrun --nproc-per-node 1 pretrain_gpt.py {words}\n")
    return memcalc.load(str(script), "vocab_size=1024", *overrides)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "delayed"),
        (" --fp8-recipe tensorwise", "tensorwise"),
        (" --fp8-recipe mxfp8", "mxfp8"),
        (" --fp8-recipe blockwise", "blockwise"),
    ],
)
def test_format_and_recipe(words: str, expected: str, tmp_path: Path) -> None:
    assert read(tmp_path, ARGUMENTS + words).training.fp8 == expected


def test_a_recipe_that_is_not_modelled_is_reported(tmp_path: Path) -> None:
    spec = read(tmp_path, ARGUMENTS + " --fp8-recipe custom")

    assert spec.training.fp8 == "none"
    assert any("fp8-recipe custom" in note for note in spec.origin.notes)


def test_weights_in_8_bits_alone(tmp_path: Path) -> None:
    spec = read(tmp_path, ARGUMENTS + " --fp8-param-gather --use-distributed-optimizer", "data_parallel=2")

    assert spec.training.fp8_params
