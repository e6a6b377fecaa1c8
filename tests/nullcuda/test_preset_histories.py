"""PyTorch's allocator on the null device against the model of it, over the steps of the presets: what was recorded."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.preset_histories import Line, device, events_of, first_difference, relative
from memcalc.allocator import history

ROOT = Path(__file__).parents[2]
RECORDS = [
    json.loads(line)
    for line in (ROOT / "benchmarks" / "recordings" / "histories" / "null-a100-80gb.jsonl").read_text().splitlines()
]


RUNS, PRESETS = 130, 69  # of plain modules and of transformers'; the other presets have neither, or no flash attention


def test_every_line_and_every_counter_was_the_same() -> None:
    """Lines of PyTorch's memory history with their addresses, and all counters of torch.cuda.memory_stats that both
    sides have, of each preset that was recorded.
    """
    assert len({record["case"] for record in RECORDS}) == len(RECORDS) >= RUNS
    assert len({record["case"].split()[0] for record in RECORDS}) >= PRESETS
    for record in RECORDS:
        assert record["first_difference"] is None, record["case"]
        assert record["different_counters"] == [], record["case"]
        assert record["counters"] > 100, record["case"]


def test_all_of_llama_405b_is_among_them() -> None:
    """Weights, gradients and two moments in bf16 are 8 bytes per parameter, and none of them a page of the host's."""
    record = next(record for record in RECORDS if record["case"].startswith("llama-3.1-405b "))

    assert record["parameters"] == 405_853_388_800
    assert record["allocated_bytes"] > 8 * record["parameters"]
    assert record["host_bytes"] < 2**30


@pytest.mark.long
@pytest.mark.parametrize("preset", ["gpt2", "llama-3.2-1b", "olmoe-1b-7b", "codegen-350m"])
def test_a_recorded_preset_comes_out_the_same(preset: str, dry_run_here: Path, null_python: str) -> None:
    """The same number of lines and the same peaks, with the release that it was recorded with."""
    record = next(record for record in RECORDS if record["case"].startswith(f"{preset} "))

    found = compare(record["case"], null_python)

    if found["versions"] != record["versions"]:
        pytest.skip(f"recorded with {record['versions']}")
    same = ("lines", "counters", "allocated_bytes", "reserved_bytes", "first_difference", "different_counters")
    assert {name: found[name] for name in same} == {name: record[name] for name in same}


def compare(case: str, python: str) -> dict[str, Any]:
    """One case, in a process on the device."""
    code = f"import json; from benchmarks.preset_histories import compared; print(json.dumps(compared({case!r})))"
    variables = os.environ | device(python)
    done = subprocess.run([python, "-c", code], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_difference_is_found() -> None:
    """A model that misplaces or omits one block is distinguished from a correct one."""
    lines: list[Line] = [("segment_alloc", 4096, 2 << 20, 0), ("alloc", 4096, 100, 0), ("alloc", 4608, 700, 0)]
    moved = [*lines[:2], ("alloc", 5120, 700, 0)]

    assert first_difference(relative(lines), relative(lines)) is None
    assert first_difference(relative(moved), relative(lines)) == (
        "line 2: model ('alloc', 1024, 700, 0), PyTorch ('alloc', 512, 700, 0)"
    )
    assert first_difference(lines[:2], lines) == "2 lines and 3"


def test_requests_are_those_of_the_history() -> None:
    """Requests and releases only, without the allocator's response: replayed, it gives the same lines."""
    lines: list[Line] = [
        ("segment_alloc", 4096, 2 << 20, 0),
        ("alloc", 4096, 100, 0),
        ("free_requested", 4096, 100, 0),
        ("free_completed", 4096, 100, 0),
        ("alloc", 4096, 300, 0),
    ]

    entries = history(events_of(lines)).entries

    found = [(entry.action, entry.address, entry.size, entry.stream) for entry in entries]
    assert relative(found) == relative(lines)
