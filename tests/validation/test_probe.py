"""The probe of what operators hold inside: on the CPU tiny, on the null device as on a GPU, beside the rules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.nullcuda.conftest import NULL_PYTHON

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.long


def probe(record: Path, *options: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.probe", "--record", str(record), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return {(line["operator"], line["shape"], line["direction"]): line for line in lines}


def test_on_the_cpu(tmp_path: Path) -> None:
    """Every operator has its lines; elementwise ones take nothing inside."""
    lines = probe(tmp_path / "probe.jsonl", "--device", "cpu", "--tiny")

    assert {direction for _, _, direction in lines} == {"forward", "backward"}
    assert lines["gelu", "float32 [8, 16]", "forward"]["hidden"] == 0
    assert len({operator for operator, _, _ in lines}) >= 18


@pytest.mark.skipif(not NULL_PYTHON.exists(), reason="no CUDA build of torch")
def test_on_the_null_device_the_rules_hold(tmp_path: Path) -> None:
    """What PyTorch's CUDA build takes inside its operators is what the rules of traces and estimates say."""
    lines = probe(tmp_path / "probe.jsonl", "--device", "null:h100-80gb", "--python", str(NULL_PYTHON))
    other = {key: (line["hidden"], line["rule"]) for key, line in lines.items() if line["hidden"] != line["rule"]}

    assert len(lines) > 150
    assert len(other) <= len(lines) // 20, other
