"""Memory snapshots, read by PyTorch's own tools."""

from __future__ import annotations

import importlib.util
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.allocator import history
from memcalc.allocator.pytorch.dump import snapshot, write_snapshot
from memcalc.events import Event, EventType
from memcalc.ledger.component import Component
from tests.allocator.running import MIB
from tests.allocator.streams import event_streams
from tests.properties.specs import examples

MM = Event(
    EventType.ALLOC,
    2,
    5 * MIB + 100,
    component=Component.ACTIVATIONS,
    phase="forward_1",
    module="layers.0.mlp",
    operator="aten.mm",
    shape=(2, 3),
    dtype="bf16",
    line="model.py:12",
    time_us=70,
)
STEP = [
    Event(EventType.PHASE, phase="forward_1", time_us=50),
    Event(EventType.ALLOC, 1, 30 * MIB, component=Component.WEIGHTS, time_us=60),
    MM,
    Event(EventType.FREE, 1, time_us=80),
    Event(EventType.ALLOC, 3, 1000, stream=2, operator="aten.add", time_us=90),
]
MM_FRAMES = [
    {"filename": "model.py", "line": 12, "name": "aten.mm"},
    {"filename": "tensor", "line": 0, "name": "bf16[2, 3]"},
    {"filename": "module", "line": 0, "name": "layers.0.mlp"},
    {"filename": "component", "line": 0, "name": "activations"},
    {"filename": "phase", "line": 0, "name": "forward_1"},
]


@pytest.fixture
def viewer() -> dict[str, Any]:
    """Return the namespace of torch/cuda/_memory_viz.py, which imports no torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("no torch")
    return runpy.run_path(str(Path(torch.origin).parent / "cuda" / "_memory_viz.py"))


def test_the_trace_is_what_pytorch_would_have_recorded() -> None:
    """Requests keep their own sizes; frees have the stack of who allocated; the last entry is the snapshot itself."""
    (trace,) = snapshot(history(STEP))["device_traces"]

    assert [(e["action"], e["size"], e["stream"], e["time_us"]) for e in trace] == [
        ("segment_alloc", 30 * MIB, 0, 60),
        ("alloc", 30 * MIB, 0, 60),
        ("segment_alloc", 20 * MIB, 0, 70),
        ("alloc", 5 * MIB + 100, 0, 70),
        ("free_requested", 30 * MIB, 0, 80),
        ("free_completed", 30 * MIB, 0, 80),
        ("segment_alloc", 2 * MIB, 2, 90),
        ("alloc", 1000, 2, 90),
        ("snapshot", 5 * MIB + 512 + 1024, 0, 90),  # active bytes: both requests in whole blocks
    ]
    assert trace[3]["frames"] == MM_FRAMES
    assert trace[4]["frames"] == [{"filename": "component", "line": 0, "name": "weights"}]
    assert [e["category"] for e in trace if "category" in e] == ["weights", "activations", "unknown", "unknown"]


def test_the_segments_are_those_at_the_end() -> None:
    segments = snapshot(history(STEP))["segments"]
    keys = "device total_size allocated_size active_size requested_size stream segment_type segment_pool_id".split()

    assert [[segment[key] for key in keys] for segment in segments] == [
        [0, 20 * MIB, 5 * MIB + 512, 5 * MIB + 512, 5 * MIB + 100, 0, "large", (0, 0)],
        [0, 2 * MIB, 1024, 1024, 1000, 2, "small", (0, 0)],  # in what the 20 leave of the driver's chunk of 32
        [0, 30 * MIB, 0, 0, 0, 0, "large", (0, 0)],
    ]
    assert [(b["size"], b["state"], b["frames"]) for b in segments[0]["blocks"]] == [
        (5 * MIB + 512, "active_allocated", MM_FRAMES),
        (15 * MIB - 512, "inactive", []),
    ]


def test_without_times_the_events_are_counted() -> None:
    events = [event._replace(time_us=None) for event in STEP]
    (trace,) = snapshot(history(events))["device_traces"]

    assert [entry["time_us"] for entry in trace] == [1, 1, 2, 2, 3, 3, 4, 4, 4]


def test_a_run_that_dies_ends_with_its_oom() -> None:
    (trace,) = snapshot(history([*STEP, Event(EventType.ALLOC, 4, 40 * MIB)], capacity=60 * MIB))["device_traces"]

    assert [entry["action"] for entry in trace[-3:]] == ["segment_free", "oom", "snapshot"]
    assert "addr" not in trace[-2]
    assert (trace[-2]["size"], trace[-2]["device_free"]) == (40 * MIB, (60 - 20 - 2) * MIB)


def test_nothing_happened() -> None:
    (trace,) = snapshot(history([]))["device_traces"]

    assert [entry["action"] for entry in trace] == ["snapshot"]


def test_on_another_device() -> None:
    found = snapshot(history(STEP), device=1)

    assert [len(trace) for trace in found["device_traces"]] == [0, 9]
    assert {segment["device"] for segment in found["segments"]} == {1}


def test_settings_are_reported() -> None:
    given = "max_split_size_mb:128,roundup_power2_divisions:4,expandable_segments:True"
    told = snapshot(history([], given))["allocator_settings"]

    assert (told["max_split_size"], told["expandable_segments"]) == (128 * MIB, True)
    assert told["roundup_power2_divisions"] == {str(2**slot): 4 for slot in range(16)}
    assert snapshot(history([]))["allocator_settings"]["max_split_size"] == -1


@pytest.mark.parametrize("config", ["", "expandable_segments:True"])
def test_pytorchs_own_sums_agree(viewer: dict[str, Any], config: str) -> None:
    """`stats` checks by itself that free and allocated bytes add up to the reserved ones."""
    found = history(STEP, config)
    text = viewer["segsum"](snapshot(found))
    reserved = viewer["Bytes"](found.reserved[-1])

    assert f"total_reserved: {reserved}\n" in text
    assert f"total_allocated: {viewer['Bytes'](5 * MIB + 100 + 1000)}\n" in text


def test_pytorchs_trace_viewer_prints_the_events(viewer: dict[str, Any]) -> None:
    """The viewer names them: a is the first segment, b the block in it, c the second segment, d the matmul result."""
    text = viewer["trace"](snapshot(history(STEP)))

    assert "\nb = a[0:30.0MiB]\n" in text
    assert "\nd = c[0:5.0MiB]\ndel b # 30.0MiB\n# free completed for b 30.0MiB\n" in text


def test_flame_graphs_group_by_phase_component_and_module(viewer: dict[str, Any]) -> None:
    lines = viewer["memory"](snapshot(history(STEP)), format_flamegraph=str)

    assert (
        "stream_0;active_allocated;phase:0:forward_1;component:0:activations;module:0:layers.0.mlp;"
        f"tensor:0:bf16[2, 3];model.py:12:aten.mm {5 * MIB + 100}\n" in lines
    )


@pytest.mark.parametrize("plot", ["trace_plot", "segment_plot"])
def test_pages_for_the_browser(viewer: dict[str, Any], plot: str) -> None:
    assert "add_local_files" in viewer[plot](snapshot(history(STEP)))


def test_the_file_opens_with_the_official_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m torch.cuda._memory_viz trace FILE`, as its documentation says."""
    pytest.importorskip("torch")
    write_snapshot(tmp_path / "run.pickle", history(STEP))
    monkeypatch.setattr(sys, "argv", ["_memory_viz.py", "trace", str(tmp_path / "run.pickle")])
    monkeypatch.delitem(sys.modules, "torch.cuda._memory_viz", raising=False)
    runpy.run_module("torch.cuda._memory_viz", run_name="__main__")  # in this process, which has imported torch

    assert "b = a[0:30.0MiB]" in capsys.readouterr().out
    with (tmp_path / "run.pickle").open("rb") as file:
        assert pickle.load(file) == snapshot(history(STEP))


@examples(60)
@given(event_streams(streams=True), st.sampled_from(["", "expandable_segments:True"]))
def test_the_history_leads_back_to_nothing(events: list[Event], config: str) -> None:
    """The viewer starts from the segments at the end and undoes the entries, the last one first."""
    found = snapshot(history(events, config))
    reserved = {(s["address"], s["address"] + s["total_size"]) for s in found["segments"]}
    blocks = {b["address"]: b["state"] for s in found["segments"] for b in s["blocks"] if b["state"] != "inactive"}

    for entry in reversed(found["device_traces"][0]):
        match entry["action"]:
            case "free_completed":
                assert entry["addr"] not in blocks
                assert any(begin <= entry["addr"] < end for begin, end in reserved)
                blocks[entry["addr"]] = "active_pending_free"
            case "free_requested":
                assert blocks[entry["addr"]] == "active_pending_free"
                blocks[entry["addr"]] = "active_allocated"
            case "alloc":
                assert blocks.pop(entry["addr"]) == "active_allocated"
            case "segment_free" | "segment_unmap":
                reserved = joined(reserved, entry["addr"], entry["addr"] + entry["size"])
            case "segment_alloc" | "segment_map":
                reserved = without(reserved, entry["addr"], entry["addr"] + entry["size"])

    assert (blocks, reserved) == ({}, set())


Ranges = set[tuple[int, int]]


def joined(ranges: Ranges, begin: int, end: int) -> Ranges:
    """Return the ranges and an additional one, which must not overlap any of them."""
    assert not any(left < end and begin < right for left, right in ranges)
    return {*ranges, (begin, end)}


def without(ranges: Ranges, begin: int, end: int) -> Ranges:
    """Return the ranges without a range that is inside one of them."""
    touched = [(left, right) for left, right in ranges if left < end and begin < right]
    assert sum(min(end, right) - max(begin, left) for left, right in touched) == end - begin
    kept = ranges - set(touched)
    pieces = {(left, begin) for left, _ in touched if left < begin} | {
        (end, right) for _, right in touched if end < right
    }
    return kept | pieces
