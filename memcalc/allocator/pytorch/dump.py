"""Export of a replay as a PyTorch memory snapshot: a pickle for PyTorch's tools and https://pytorch.org/memory_viz.

Source of the format: torch/csrc/cuda/Module.cpp: THCPModule_memorySnapshot; its readers: torch/cuda/_memory_viz.py and
torch/utils/viz/MemoryViz.js.
"""

from __future__ import annotations

import pickle
from functools import cache
from pathlib import Path
from typing import Any

from memcalc.allocator.pytorch.history import History, HistoryEntry
from memcalc.allocator.pytorch.settings import Settings
from memcalc.allocator.sizes import UNLIMITED
from memcalc.allocator.views import SegmentView
from memcalc.events.event import Event, EventType
from memcalc.files import writing
from memcalc.ledger.component import Component
from memcalc.units import whole_number

Stack = list[dict[str, Any]]  # frames, innermost first

COMPONENT = "component"  # file name of the frame that names the component
UNATTRIBUTED = "unknown"  # the viewer expects a category of this name if there are any categories


_EMPTY_CACHE: Stack = [{"filename": "torch/cuda/memory.py", "line": 0, "name": "empty_cache"}]


def write_snapshot(path: Path | str, history: History) -> None:
    """Write the file that torch.cuda.memory._dump_snapshot would write at the end of the run."""
    with writing(path) as file:
        pickle.dump(snapshot(history), file)


def snapshot(history: History, device: int = 0) -> dict[str, Any]:
    """Return what torch.cuda.memory._snapshot() would return at the end of the run, or when it runs out of memory.

    An event without a source line still has frames: operator, module, component and phase, from innermost to outermost.
    The viewer's stacks and flame graphs group by them.
    """
    frames = cache(_frames)  # identical tensors share a stack, which keeps the file small

    def stack(event: Event) -> Stack:
        if event.kind is EventType.EMPTY_CACHE:
            return _EMPTY_CACHE
        place = (event.line, event.operator, event.shape, event.dtype)
        return frames(*place, event.module, event.component, event.phase)

    alive: dict[int, Event] = {}  # by address
    traces = []
    for entry in history.entries:
        event = history.events[entry.event]
        if entry.action == "alloc":
            alive[entry.address] = event
        maker = alive.get(entry.address, event) if entry.action.startswith("free") else event
        traces.append(_trace_entry(history, entry, event, stack(maker)))
    active = sum(segment.active_size for segment in history.result.segments)
    time = traces[-1]["time_us"] if traces else 0
    closing: dict[str, Any] = {
        "action": "snapshot",
        "addr": 0,
        "size": active,
        "stream": 0,
        "time_us": time,
        "frames": [],
    }
    stacks = {address: stack(event) for address, event in alive.items()}
    return {
        "segments": [_segment(segment, stacks, device) for segment in history.result.segments],
        "device_traces": [[] for _ in range(device)] + [[*traces, closing | {"category": UNATTRIBUTED}]],
        "allocator_settings": _settings(history.settings),
        "external_annotations": [],
    }


def _trace_entry(history: History, entry: HistoryEntry, event: Event, frames: Stack) -> dict[str, Any]:
    line = {
        "action": entry.action,
        "addr": entry.address,
        "size": entry.size,
        "stream": entry.stream,
        "time_us": entry.event if event.time_us is None else event.time_us,
        "frames": frames,
    }
    if entry.action == "oom":
        del line["addr"]
        line["device_free"] = history.free_bytes
    elif entry.action == "alloc":
        line["category"] = event.component.value if event.component is not None else UNATTRIBUTED
    return line


def _frames(
    line: str, operator: str, shape: tuple[int, ...], dtype: str, module: str, component: Component | None, phase: str
) -> Stack:
    """Return the frames of an allocation: source line with operator, tensor, module, component and phase."""
    file, _, number = line.rpartition(":")
    position = whole_number(number) if file else None
    place = {"filename": "operator" if position is None else file, "line": position or 0, "name": operator}
    outer = {
        "tensor": f"{dtype}[{', '.join(map(str, shape))}]" if dtype else "",
        "module": module,
        COMPONENT: component.value if component is not None else "",
        "phase": phase,
    }
    names = [{"filename": kind, "line": 0, "name": name} for kind, name in outer.items() if name]
    return ([place] if position is not None or operator else []) + names


def _segment(segment: SegmentView, stacks: dict[int, Stack], device: int) -> dict[str, Any]:
    return {
        **segment._asdict(),
        "device": device,
        "segment_pool_id": (0, segment.segment_pool_id),
        "frames": [],
        "blocks": [
            {**block._asdict(), "frames": stacks.get(block.address, []) if block.state != "inactive" else []}
            for block in segment.blocks
        ],
    }


def _settings(settings: Settings) -> dict[str, Any]:
    divisions = settings.roundup_power2_divisions or (0,) * 16
    return {
        "max_split_size": -1 if settings.max_split_size == UNLIMITED else settings.max_split_size,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {str(2**slot): steps for slot, steps in enumerate(divisions)},
    }
