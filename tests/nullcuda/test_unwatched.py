"""Watching a step with a dispatch mode changes nothing of what it allocates: see memcalc/recorder/in_place.py."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from memcalc.nullcuda.gpu_description import find_null_gpu
from memcalc.nullcuda.tracing import step_environment
from memcalc.spec.loading import load

SMALL = ("l=2", "V=512", "s=64", "b=2")
QUICK = (("gpt2", *SMALL),)  # a residual's gradients
LONG = (
    ("mixtral-8x7b", "implementation=huggingface", "recipe=amp", *SMALL, "l=1"),  # rows by index, autocast
    ("llama-3.2-1b", "recompute=full", "implementation=huggingface", *SMALL),
    ("mixtral-8x7b", *SMALL, "l=1"),
    ("codegen-350m", "recipe=amp", *SMALL),
    ("gpt2", "gradient_accumulation_steps=2", "recompute=selective", *SMALL),
    ("gpt2", "attention=eager", "recipe=fp32", "dtype=fp32", *SMALL),
    ("qwen3-0.6b", "implementation=huggingface", *SMALL),
    ("gemma-2-2b", "implementation=huggingface", "attention=eager", *SMALL),
    ("deepseek-v2-lite", "implementation=huggingface", "attention=eager", *SMALL),
    ("phi-2", "recompute=every-2", *SMALL),
    ("falcon-7b", "implementation=huggingface", "attention=eager", *SMALL),
    ("gpt2", "optimizer=muon", *SMALL),
)


def check(cases: tuple[tuple[str, ...], ...], python: str, tmp_path: Path) -> None:
    specs = [load(name, overrides).model_dump(mode="json") for name, *overrides in cases]
    (tmp_path / "specs.json").write_text(json.dumps(specs))
    card = find_null_gpu("h100-80gb")
    script = Path(__file__).parent / "unwatched.py"
    done = subprocess.run(
        [python, script, tmp_path / "specs.json"],
        env=os.environ | step_environment(card, card, python, tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for case, (plain, watched) in zip(cases, json.loads(done.stdout), strict=True):
        assert len(plain) > 400, case
        assert watched == plain, case


@pytest.mark.long
def test_a_plain_step(null_python: str, tmp_path: Path) -> None:
    check(QUICK, null_python, tmp_path)


@pytest.mark.long
def test_more_kinds_of_step(null_python: str, tmp_path: Path) -> None:
    check(LONG, null_python, tmp_path)
