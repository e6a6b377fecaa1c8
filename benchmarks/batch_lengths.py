"""The memory that a run with batches of different lengths needs, by the lengths of the first two and of many more.

    python -m benchmarks.batch_lengths [FAMILY:SEED:NUMBER ...]

For each recorded program it prints by how many percent the smallest memory on which a replay finishes exceeds that of
batches of one length: first for the orders of the verdict, then for each length of the first two batches, in eighths of
the longest, then for random orders of 10 and of 90 batches that begin with the same 10.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.programs.compare import settings, write_files
from benchmarks.programs.record import read_records, record_path
from memcalc.errors import OutOfMemory
from memcalc.importers.loading import load
from memcalc.simulation.batch_lengths import BatchLength, orders_of
from memcalc.simulation.simulated_run import run_requests
from memcalc.spec.spec import Spec
from memcalc.stream.requests import Replay, replay

PROGRAMS = ("trainer-5:held-out:2", "trainer-5:development:6", "trl-sft:held-out:2")
FIRST, SECOND = range(1, 9), (1, 4, 7, 8)
MORE = (1, 3, 5, 8, 12, 17)  # percent of memory beyond that of batches of one length
ORDERS, FEW, MANY = 4, 10, 90
TRUNCATED = 0.3  # of the batches of a random order: as long as the longest


def main() -> None:
    """Print a table for each program."""
    for name in sys.argv[1:] or PROGRAMS:
        family, seed, number = name.split(":")
        record = next(each for each in read_records(record_path(family, seed)) if each["number"] == int(number))
        with tempfile.TemporaryDirectory() as folder:
            write_files(record, folder)
            path = Path(folder, record["sized"]["file"])
            spec = load(path, settings(record, named=True), gpu=record["card"])
        longest = spec.training.sequence_length
        base = played(spec, ())
        assert base is not None
        print(f"{name}: {base.reserved_bytes / 2**20:.0f} MiB with batches of {longest} tokens")
        print("  orders of the verdict:", *(excess(spec, lengths, base) for lengths in orders_of(spec)))
        for first in FIRST:
            orders = [[BatchLength(longest * each // 8) for each in (first, second, 8, 8)] for second in SECOND]
            found = [excess(spec, lengths, base) for lengths in orders]
            print(f"  first {first}/8, second {'/8, '.join(map(str, SECOND))}/8:", *found)
        for order in range(ORDERS):
            rng = random.Random(order)
            lengths = [
                BatchLength(longest if rng.random() < TRUNCATED else rng.randint(longest // 32, longest))
                for _ in range(MANY)
            ]
            print(f"  random order {order}:", *(excess(spec, lengths[:many], base) for many in (FEW, MANY)))


def excess(spec: Spec, lengths: Sequence[BatchLength], base: Replay) -> int:
    """The largest of MORE with which the run still does not finish; 0: it finishes with the memory of `base`."""
    rooms = {percent: base.reserved_bytes * (100 + percent) // 100 for percent in MORE}
    return max((percent for percent, room in rooms.items() if played(spec, lengths, room) is None), default=0)


def played(spec: Spec, lengths: Sequence[BatchLength], room: int | None = None) -> Replay | None:
    """The replay with this memory; None: it does not finish."""
    training = spec.training
    try:
        requests = run_requests(spec, lengths=tuple(lengths))
        return replay(requests, training.alloc_conf, training.torch_version.removeprefix("v"), room)
    except OutOfMemory:
        return None


if __name__ == "__main__":
    main()
