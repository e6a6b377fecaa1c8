"""The caching allocator on the null device, operation by operation, against the golden traces and the simulator."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from memcalc.allocator.blocks import Block
from memcalc.allocator.driver import Driver
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.pytorch.settings import parse_settings
from memcalc.allocator.pytorch.versions import parse_version
from memcalc.errors import OutOfMemory
from memcalc.nullcuda import environment

HERE = Path(__file__).parent
GOLDEN: dict[str, Any] = json.loads((HERE.parent / "allocator" / "golden.json").read_text())
MIB = 2**20
NAMES = "allocated_bytes active_bytes requested_bytes reserved_bytes inactive_split_bytes segment".split()


@pytest.fixture
def version(null_python: str) -> str:
    """Of the torch on the device: "2.13.0"."""
    code = "from importlib.metadata import version; print(version('torch'))"
    return (
        subprocess.run([null_python, "-c", code], capture_output=True, text=True, check=True)
        .stdout.split("+")[0]
        .strip()
    )


def on_the_device(python: str, cases: list[dict[str, Any]], capacity: int) -> list[list[list[Any]]]:
    """Rows of each case on a GPU of that capacity, nothing of it reserved, on which work waits for the host."""
    Path("cases.json").write_text(json.dumps(cases))
    variables = environment("h100-80gb", pythons=[python], delayed_events=True)
    figures = re.sub(r"memory=\d+ reserve=\d+", f"memory={capacity} reserve=0", variables["MEMCALC_NULL_PROPERTIES"])
    subprocess.run(
        [python, HERE / "allocating.py", "cases.json", "rows.json"],
        env=os.environ | variables | {"MEMCALC_NULL_PROPERTIES": figures},
        check=True,
    )
    rows: list[list[list[Any]]] = json.loads(Path("rows.json").read_text())
    return rows


@pytest.mark.long
def test_the_golden_traces_are_reproduced(dry_run_here: Path, null_python: str, version: str) -> None:
    cases = [case for case in GOLDEN["cases"] if version in case["torch_versions"]]
    if not cases:
        pytest.skip(f"no golden traces of torch {version}")
    asked = [{"config": case["config"], "operations": [row[0] for row in case["rows"]]} for case in cases]

    found = on_the_device(null_python, asked, GOLDEN["device_total"])

    for case, rows in zip(cases, found, strict=True):
        for number, (row, (where, counters)) in enumerate(zip(case["rows"], rows, strict=True)):
            operation, offset, expected = row
            place = f"{case['config']}, operation {number}: {operation}"
            # Addresses are compared below: the driver of the golden traces gave them in another order.
            assert (where == "oom") == (offset == "oom"), place
            assert counters == expected, place


CONFIGS = [
    "",
    "max_split_size_mb:64",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.6",
    "expandable_segments:True",
]


def random_operations(seed: int) -> list[list[Any]]:
    """A few hundred, of sizes on both sides of every limit of the allocator, on three streams."""
    chance = random.Random(seed)
    alive: list[int] = []
    operations: list[list[Any]] = []
    for key in range(300):
        kind = chance.random()
        if kind < 0.55 or not alive:
            size = chance.choice(
                [chance.randrange(1, MIB), chance.randrange(MIB, 10 * MIB), chance.randrange(1, 90 * MIB)]
            )
            operations.append(["alloc", key, size, chance.choice([0, 0, 0, 1, 2])])
            alive.append(key)
        elif kind < 0.93:
            operations.append(["free", alive.pop(chance.randrange(len(alive)))])
        elif kind < 0.97:
            operations.append(["record_stream", chance.choice(alive), chance.choice([0, 1, 2])])
        elif kind < 0.985:
            operations.append(["events_ready", chance.randrange(2)])
        else:
            operations.append(["empty_cache"])
    return operations


def simulated(config: str, version: str, operations: list[list[Any]], capacity: int) -> list[list[Any]]:
    """Return addresses and counters after each operation, from the simulated allocator."""
    torch = parse_version(version)
    allocator = CachingAllocator(parse_settings(config, torch, None), torch, Driver(capacity))
    blocks: dict[int, Block] = {}
    first: int | None = None
    rows: list[list[Any]] = []
    for name, *arguments in operations:
        where: int | str | None = None
        if name == "alloc":
            try:
                block = blocks[arguments[0]] = allocator.malloc(arguments[1], arguments[2])
            except OutOfMemory:
                where = "oom"
            else:
                first = block.address if first is None else first
                where = block.address - first
        elif name == "free" and arguments[0] in blocks:
            allocator.free(blocks.pop(arguments[0]))
        elif name == "record_stream" and arguments[0] in blocks:
            allocator.record_stream(blocks[arguments[0]], arguments[1])
        elif name == "empty_cache":
            allocator.empty_cache()
        elif name == "events_ready":
            allocator.uses.ready = bool(arguments[0])
        figures = allocator.statistics()
        counters = [figures[f"{counter}.all.current"] for counter in NAMES]
        rows.append([where, [*counters, figures["num_alloc_retries"], figures["num_ooms"]]])
    return rows


@pytest.mark.parametrize("traces", [1, pytest.param(60, marks=pytest.mark.long)])
def test_random_traces_agree_with_the_simulator(
    dry_run_here: Path, null_python: str, version: str, traces: int
) -> None:
    capacity = 700 * MIB
    cases: list[dict[str, Any]] = [
        {"config": {"alloc_conf": config} if config else {}, "operations": random_operations(seed)}
        for config in (CONFIGS if traces > 1 else CONFIGS[::8])  # all of them in the long test
        for seed in range(traces)
    ]

    found = on_the_device(null_python, cases, capacity)

    for case, rows in zip(cases, found, strict=True):
        config = case["config"].get("alloc_conf", "")
        expected = simulated(config, version, case["operations"], capacity)
        for number, ((where, counters), (offset, figures)) in enumerate(zip(rows, expected, strict=True)):
            place = f"{config!r}, operation {number}: {case['operations'][number]}"
            assert counters == figures, place
            if "expandable" not in config or "oom" in (where, offset):  # its ranges are the system's to place
                assert where == offset, place
