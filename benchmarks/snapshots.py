"""How long a snapshot of a million entries takes to read, to check and to replay, and with how much memory.

The history is that of training steps in miniature, made by the model itself; each entry has a stack of a dozen frames,
out of a few hundred, in a list of its own, as PyTorch writes them.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.replay import training
from memcalc.allocator import history
from memcalc.allocator.pytorch.dump import snapshot
from memcalc.snapshots.composition import compose
from memcalc.snapshots.initial_state import beginning
from memcalc.snapshots.reading import read_snapshot
from memcalc.snapshots.stream import events_of
from memcalc.snapshots.verification import verify

STACKS, FRAMES = 300, 12


def write(path: Path, entries: int) -> int:
    """A snapshot with at least so many entries; returns how many."""
    found = snapshot(history(training(entries * 2 // 3)))
    frames = [{"filename": f"/home/me/train/module_{i}.py", "line": i, "name": f"forward_{i}"} for i in range(500)]
    stacks = [[frames[(7 * i + j) % len(frames)] for j in range(FRAMES)] for i in range(STACKS)]
    trace: list[dict[str, Any]] = found["device_traces"][0]
    for number, entry in enumerate(trace):
        entry["frames"] = list(stacks[number * 31 % STACKS])
    with path.open("wb") as file:
        pickle.dump(found, file)
    return len(trace)


def timed(what: str, call: Callable[[], Any]) -> Any:
    """Prints how long a call takes, and what it returns."""
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    peaks = [resource.getrusage(who).ru_maxrss / 2**20 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(f"{what:10} {seconds:6.2f} s, largest so far {peaks[0]:.2f} GiB here and {peaks[1]:.2f} GiB in the reader")
    return result


def main() -> None:
    """Write a snapshot, unless one is named, and read it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--file", type=Path, help="this snapshot instead; where there is none it is written")
    options = parser.parse_args()
    path = options.file or Path(tempfile.mkdtemp()) / "large.pickle"
    if not path.exists():
        print(
            f"{write(path, options.entries):,} entries, {path.stat().st_size / 2**20:,.0f} MiB: {path}; run again on it"
        )
        return
    found = timed("read", lambda: read_snapshot(path))
    recording = found.recordings[0]
    print(f"{len(recording.entries):,} entries")
    start = timed("beginning", lambda: beginning(recording))
    timed("events", lambda: events_of(found, recording, start))
    timed("verify", lambda: verify(found, recording, start))
    timed("compose", lambda: compose(found, recording, start))


if __name__ == "__main__":
    main()
