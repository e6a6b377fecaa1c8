"""Runs operations of the caching allocator on the device and writes its counters after each: CASES OUT."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

NAMES = "allocated_bytes active_bytes requested_bytes reserved_bytes inactive_split_bytes segment".split()


def main(cases: str, out: str) -> None:
    """Each case in a fork of this process with a new allocator."""
    found = []
    for case in json.loads(Path(cases).read_text()):
        read, write = os.pipe()
        if os.fork() == 0:
            with os.fdopen(write, "w") as file:
                json.dump(rows(case), file)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            found.append(json.load(file))
        os.wait()
    Path(out).write_text(json.dumps(found))


# By its name since torch 2.8, and before.
set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings


def rows(case: dict[str, Any]) -> list[tuple[Any, list[int]]]:
    """After each operation: where it allocated, from the first address on, or "oom", and the counters."""
    if conf := case["config"].get("alloc_conf"):
        set_settings(conf)
    if fraction := case["config"].get("fraction"):
        torch.cuda.set_per_process_memory_fraction(fraction)
    streams = {0: torch.cuda.default_stream()}
    tensors: dict[int, torch.Tensor] = {}
    first, ready, found = None, True, []
    for name, *arguments in case["operations"]:
        # Work of this device is complete only when the host waits, and the allocator looks only when it allocates.
        if ready and name in {"alloc", "empty_cache"}:
            torch.cuda.synchronize()
        where: int | str | None = None
        if name == "alloc":
            key, size, stream = arguments
            try:
                with torch.cuda.stream(streams.setdefault(stream, torch.cuda.Stream())):
                    tensors[key] = torch.empty(size, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                where = "oom"
            else:
                address = tensors[key].data_ptr()
                first = address if first is None else first
                where = address - first
        elif name == "free":
            tensors.pop(arguments[0], None)  # none: it found no memory
        elif name == "record_stream" and arguments[0] in tensors:
            tensors[arguments[0]].record_stream(streams.setdefault(arguments[1], torch.cuda.Stream()))
        elif name == "empty_cache":
            torch.cuda.empty_cache()
        elif name == "events_ready":
            ready = bool(arguments[0])
        stats = torch.cuda.memory_stats()
        counters = [stats.get(f"{name}.all.current", 0) for name in NAMES]
        found.append((where, [*counters, stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0)]))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
