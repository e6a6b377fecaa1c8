"""The diary of a replay beside PyTorch's own memory history. Needs `make .venv-null`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.preset_histories import relative
from memcalc.allocator import history
from memcalc.events import Event, EventType
from memcalc.nullcuda import environment

RECORD = """
import json, random, torch
torch.empty(1, device="cuda")
torch.cuda.empty_cache()
torch.cuda.memory._record_memory_history("all", stacks="python")
chance, alive, events = random.Random(7), {}, []
for number in range(600):
    what = chance.random()
    if alive and what < 0.45:
        key = chance.choice(list(alive))
        del alive[key]
        events.append(["free", key])
    elif what < 0.47:
        torch.cuda.empty_cache()
        events.append(["empty_cache"])
    else:
        size = chance.choice([chance.randrange(1, 5000), chance.randrange(1, 30 * 2**20)])
        alive[number] = torch.empty(size, dtype=torch.uint8, device="cuda")
        events.append(["alloc", number, size])
trace = torch.cuda.memory._snapshot()["device_traces"][0]
print(json.dumps([events, [[e["action"], e["addr"], e["size"], e["stream"]] for e in trace]]))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "config",
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:24,roundup_power2_divisions:4",
    ],
)
def test_entries_are_those_that_pytorch_notes(config: str, dry_run_here: Path, null_python: str) -> None:
    """Actions, sizes and order, and within each segment the addresses, over 600 random operations."""
    done = subprocess.run(
        [null_python, "-c", RECORD],
        env=os.environ | environment("h100-80gb", pythons=[null_python]) | {"PYTORCH_CUDA_ALLOC_CONF": config},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    events, trace = json.loads(done.stdout.splitlines()[-1])

    found = history([Event(EventType(kind), *rest) for kind, *rest in events], config)

    ours = [(entry.action, entry.address, entry.size, entry.stream) for entry in found.entries]
    theirs = [tuple(entry) for entry in trace if entry[0] != "snapshot"]
    assert len(theirs) > 900
    assert relative(ours) == relative(theirs)
