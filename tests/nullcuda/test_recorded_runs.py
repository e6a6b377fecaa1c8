"""The recorded runs of docs/reports/training-scripts.md again, as far as torch and transformers are all they need."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memcalc.nullcuda import run
from tools.dry_runs import listed

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def recorded() -> list[Any]:
    """Those of one process, but for DDP: whether it still holds its first bucket is a matter of time."""
    found: list[Any] = []
    for group in ("single", "ranks"):
        cases = {case["case"]: case for case in listed()[group]}
        for line in (BENCHMARKS / "recordings" / "dry-runs" / f"{group}.jsonl").read_text().splitlines():
            record = json.loads(line)
            alone = record["gpus"] == 1 or ("world_size" in record["options"] and not record["case"].startswith("ddp"))
            if set(cases[record["case"]]["packages"]) <= {"torch", "transformers"} and alone:
                found.append(pytest.param(record, id=record["case"], marks=pytest.mark.long))
    return found


@pytest.mark.parametrize("record", recorded())
def test_a_recorded_run_comes_out_the_same(record: dict[str, Any], dry_run_here: Path, null_python: str) -> None:
    """To the byte, with the same versions."""
    versions = {name: version for name, version in record["versions"].items() if name != "python"}
    asks = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    installed = subprocess.run([null_python, "-c", asks, *versions], capture_output=True, text=True, check=False)
    if installed.stdout.split() != list(versions.values()):
        pytest.skip(f"recorded with {versions}")
    places = {"bin": str(Path(null_python).parent), "here": str(BENCHMARKS)}

    with Path("out").open("w") as out:
        words = shlex.split(record["command"].format(**places))
        found = run(words, record["card"], gpus=record["gpus"], stdout=out, **record["options"])

    assert found.outcome == record["outcome"]
    assert found.allocated_bytes == record["ranks"][0]["allocated_bytes"]
    method, _, ranks = record["case"].partition("-")
    if method in SHARDED:
        assert json.loads(Path("out").read_text().splitlines()[-1]) == SHARDED[method](int(ranks))


EMBEDDING = 128256 * 2048
NORMS = (2 * 16 + 1) * 2048
LAYERS = 16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192)


def fp32_shards(ranks: int) -> dict[str, int]:
    """Weights, gradients and two moments in fp32; every first dimension can be divided by 64."""
    each = 4 * (EMBEDDING + NORMS + LAYERS) // ranks
    return {"parameters": each, "gradients": each, "optimizer": 2 * each}


def tensor_parallel(ranks: int) -> dict[str, int]:
    """All in bf16. Products are divided; norms and the embedding, which is the head too, are on every rank."""
    if ranks == 64:  # eight layers of Llama-65B, with an untied LM head
        whole, divided = 2 * 32000 * 8192 + 17 * 8192, 8 * (4 * 8192 * 8192 + 3 * 8192 * 22016)
    else:
        whole, divided = EMBEDDING + NORMS, LAYERS
    each = 2 * (whole + divided // ranks)
    return {"parameters": each, "gradients": each, "optimizer": 2 * each}


SHARDED: dict[str, Callable[[int], dict[str, int]]] = {
    "fsdp2": fp32_shards,
    "hsdp": lambda _: fp32_shards(2),  # shards of 2, however many ranks
    "tp": tensor_parallel,
}
