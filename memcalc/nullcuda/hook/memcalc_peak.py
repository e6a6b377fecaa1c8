"""Live allocations at the peak by line of the program, from PyTorch's own allocation history."""

from __future__ import annotations

import os
from typing import Any

# ruff: noqa: INP001 -- a directory on PYTHONPATH, not a package

LARGEST_SHOWN = 25  # allocations at the peak
HERE = __file__.rpartition(os.sep)[0]  # frames of this directory, around optimizer steps, are not the program's
PACKAGES = f"{os.sep}site-packages{os.sep}"


def largest_allocations(torch: Any) -> list[dict[str, Any]]:
    """Return the live allocations at each device's peak by line of the program, largest first."""
    found = []
    for device, events in enumerate(torch.cuda.memory._snapshot()["device_traces"]):  # noqa: SLF001 -- as in memcalc_watch.py
        alive: dict[int, Any] = {}
        at_peak: list[Any] = []
        level = peak = 0
        rising = False
        for event in [*events, None]:
            action = event["action"] if event else "free_requested"
            if action == "alloc":
                alive[event["addr"]] = event
                level += event["size"]
                rising = True
            elif action == "free_requested":
                if rising and level > peak:  # a local peak: copied only if it exceeds all earlier ones
                    peak, at_peak = level, list(alive.values())
                rising = False
                gone = alive.pop(event["addr"], None) if event else None
                level -= gone["size"] if gone else 0
        places: dict[str, list[int]] = {}
        for event in at_peak:
            place = places.setdefault(place_of(event.get("frames", ())), [0, 0])
            place[0] += event["size"]
            place[1] += 1
        ranked = sorted(places.items(), key=lambda item: -item[1][0])[:LARGEST_SHOWN]
        found += [{"device": device, "where": where, "bytes": size, "count": n} for where, (size, n) in ranked]
    return found


def place_of(frames: Any) -> str:
    """Return the innermost line outside of torch; for a line in a package, also the program's line that called it."""
    lines = [frame for frame in frames if frame["filename"].endswith(".py") or frame["filename"].startswith("<")]
    lines = [frame for frame in lines if frame["filename"].rpartition(os.sep)[0] != HERE]
    own = [frame for frame in lines if f"{os.sep}torch{os.sep}" not in frame["filename"]]
    written = [frame for frame in own if "<" not in frame["filename"]]
    users = [frame for frame in written if PACKAGES not in frame["filename"]]
    for inner in written or own or lines:
        called = users and users[0] is not inner
        return f"{_line(inner)}, from {_line(users[0])}" if called else _line(inner)
    return "backward"  # autograd's own threads have no Python frames


def _line(frame: Any) -> str:
    name = frame["filename"].rpartition(PACKAGES)[2].removeprefix(f"{os.getcwd()}{os.sep}")  # noqa: PTH109 -- without pathlib
    return f"{name}:{frame['line']} {frame['name']}"
