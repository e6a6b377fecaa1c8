"""The golden traces: what the released wheels did, operation by operation, on a driver that only keeps the books."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memcalc.allocator.addresses import FreeRanges
from memcalc.allocator.blocks import Block
from memcalc.allocator.driver import Driver
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.pytorch.settings import parse_settings
from memcalc.allocator.pytorch.versions import parse_version
from memcalc.errors import OutOfMemory
from tests.allocator.running import END

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden.json").read_text())

CASES = [
    pytest.param(version, case, id=f"{version}-{i}-{case['config'].get('alloc_conf', case['config'] or 'default')}")
    for i, case in enumerate(GOLDEN["cases"])
    for version in case["torch_versions"]
]


def counters(allocator: CachingAllocator) -> list[int]:
    """In the order of the golden rows."""
    statistics = allocator.statistics()
    names = "allocated_bytes active_bytes requested_bytes reserved_bytes inactive_split_bytes segment".split()
    return [
        *(statistics[f"{name}.all.current"] for name in names),
        statistics["num_alloc_retries"],
        statistics["num_ooms"],
    ]


@pytest.mark.parametrize(("version", "case"), CASES)
def test_every_counter_and_address_after_every_operation(version: str, case: dict[str, Any]) -> None:
    config = case["config"]
    torch_version = parse_version(version)
    allocator = CachingAllocator(
        parse_settings(config.get("alloc_conf", ""), torch_version, config.get("fraction")),
        torch_version,
        Driver(GOLDEN["device_total"], addresses=FreeRanges(2**46, END)),  # as the driver below the wheels gave them
    )
    blocks: dict[int, Block] = {}
    first: int | None = None
    for number, ((name, *arguments), expected_offset, expected) in enumerate(case["rows"]):
        offset: int | str | None = None
        match name, arguments:
            case "alloc", [key, size, stream]:
                try:
                    blocks[key] = allocator.malloc(size, stream)
                except OutOfMemory:
                    offset = "oom"
                else:
                    first = blocks[key].address if first is None else first
                    offset = blocks[key].address - first
            case "free", [key]:
                allocator.free(blocks.pop(key))
            case "record_stream", [key, stream]:
                allocator.record_stream(blocks[key], stream)
            case "empty_cache", []:
                allocator.empty_cache()
            case "events_ready", [ready]:
                allocator.uses.ready = bool(ready)
            case _:
                raise AssertionError(name)
        where = f"operation {number}: {name} {arguments}"
        if expected_offset is not None:
            assert offset == expected_offset, where
        assert counters(allocator) == expected, where
