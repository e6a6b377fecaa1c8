"""The requests of PyTorch's math kernel of attention: the allocator replay beside PyTorch's own memory history.

`memcalc trace --device null` is no record of it: under its dispatch mode the kernel does not mask scores in place.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import memcalc
from benchmarks.preset_histories import device
from tools.request_order import BLOCK, replayed_requests

# Each case in a fork of a process that has imported torch and transformers, and has not yet used the GPU.
RECORD = """
import json, os, sys, torch
from benchmarks.preset_histories import Silent
import memcalc
from memcalc.step import huggingface
from memcalc.step.loop import TrainingRun
def record(name, words):
    run = TrainingRun(memcalc.load(*words, gpu=sys.argv[1]), torch.device("cuda", 0))
    torch.cuda.memory._record_memory_history("all", stacks="python")
    run.execute(3, Silent())
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    with open(f"{name}.json", "w") as file:
        json.dump([[e["action"], e["addr"], e["size"]] for e in trace], file)
for name, words in json.loads(sys.argv[2]).items():
    child = os.fork()
    if child == 0:
        record(name, words)
        os._exit(0)
    os.waitpid(child, 0)
"""
CARD = "a100-80gb"
SMALL = ("implementation=huggingface", "recipe=fp32", "l=2", "V=3000", "s=256")
CASES = {
    "llama": ("llama-3.2-1b", *SMALL, "b=2"),
    "qwen2, one sequence": ("qwen2.5-0.5b", *SMALL, "b=1"),
    "qwen3, recomputed, dropout": ("qwen3-0.6b", *SMALL, "b=2", "recompute=full", "dropout=0.1"),
}


def requests_of(history: list[tuple[str, int, int]]) -> list[tuple[int, frozenset[int]]]:
    """Sizes above one block, each with the requests that were freed since the one before."""
    found: list[tuple[int, frozenset[int]]] = []
    alive: dict[int, int] = {}
    freed: list[int] = []
    for action, address, size in history:
        if action == "alloc" and size > BLOCK:
            alive[address] = len(found)
            found.append((size, frozenset(freed)))
            freed = []
        elif action == "free_requested" and address in alive:
            freed.append(alive.pop(address))
    return found


@pytest.fixture(scope="module")
def recorded(null_python: str, null_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of PyTorch's memory histories."""
    folder = tmp_path_factory.mktemp("histories")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", str(null_cache))
        done = subprocess.run(
            [null_python, "-c", RECORD, CARD, json.dumps(CASES)],
            env=os.environ | device(null_python),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_requests_are_those_of_pytorch(case: str, recorded: Path) -> None:
    spec = memcalc.load(*CASES[case], gpu=CARD)
    assert spec.training.attention == "math"

    theirs = requests_of(json.loads((recorded / f"{case}.json").read_text()))
    ours = [(request.size, request.freed) for request in replayed_requests(spec)]
    assert len(theirs) > 300
    assert ours == theirs
