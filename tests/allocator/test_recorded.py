"""What the released wheels reported at the end of random streams: all statistics, messages and the snapshot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memcalc.allocator.addresses import FreeRanges
from memcalc.allocator.blocks import Block
from memcalc.allocator.views import SegmentView
from memcalc.errors import OutOfMemory
from tests.allocator.running import END, allocator

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded.json").read_text())

RUNS = [
    pytest.param(version, case, result, id=f"{version}-{case['alloc_conf'] or case['fraction'] or 'default'}")
    for case in RECORDED["cases"]
    for result in case["results"]
    for version in result["torch_versions"]
]


def as_recorded(view: SegmentView, first: int) -> list[object]:
    blocks = [[b.size, None if b.state == "inactive" else b.requested_size, b.state] for b in view.blocks]
    offset = None if view.is_expandable else view.address - first
    figures = [view.total_size, view.allocated_size, view.active_size, view.requested_size, view.stream]
    return [offset, *figures, view.segment_type, view.is_expandable, blocks]


@pytest.mark.parametrize(("version", "case", "result"), RUNS)
def test_everything_that_was_reported(version: str, case: dict[str, Any], result: dict[str, Any]) -> None:
    # The driver below those wheels gave addresses first-fit.
    subject = allocator(case["alloc_conf"], version, RECORDED["device_total"], case["fraction"], FreeRanges(2**46, END))
    alive: dict[int, Block] = {}
    first = 0
    messages: list[list[object]] = []
    for number, (name, *arguments) in enumerate(case["ops"]):
        match name, arguments:
            case "alloc", [key, size, stream]:
                try:
                    alive[key] = subject.malloc(size, stream)
                except OutOfMemory as error:
                    messages.append([number, str(error)])
                first = first or alive[key].address
            case "free", [key] if key in alive:
                subject.free(alive.pop(key))
            case "record_stream", [key, stream] if key in alive:
                subject.record_stream(alive[key], stream)
            case "empty_cache", []:
                subject.empty_cache()
            case "reset_peak", []:
                subject.counters.reset_peaks()

    assert subject.statistics() == result["statistics"]
    assert messages[:2] == result["messages"]
    segments = [as_recorded(view, first) for view in subject.segments()]
    if "expandable_segments" in case["alloc_conf"]:
        segments.sort(key=lambda row: (row[5], row[6], row[1:]))
    assert segments == result["segments"]
