"""Where the driver puts segments: worked by hand, and as memory snapshots of a real H100 have them."""

from __future__ import annotations

import gzip
import pickle
import random
from pathlib import Path

import pytest

from memcalc.allocator.addresses import CHUNK, AddressSpace
from tests.allocator.running import END, MIB

SNAPSHOTS = Path(__file__).parents[2] / "benchmarks/recordings/gpu/h100-80gb-torch-2.11.0/snapshots"
NAMES = ("shuffled", "shuffled-gc", "shuffled-max-split", "shuffled-roundup")


def test_chunks_lie_one_below_the_other_and_small_ranges_fill_them() -> None:
    """20 of a chunk of 32, then 102 of one of 128 below it; 12 fill up the lowest chunk with room, which has 26."""
    space = AddressSpace(END)

    offsets = [(space.allocate(size * MIB) - END) // MIB for size in (20, 102, 12, 12, 12, 2)]

    assert offsets == [-32, -160, -160 + 102, -160 + 114, -12, -160 + 126]


def test_a_hole_is_taken_only_if_a_chunk_fits_into_it_wherever_it_begins() -> None:
    """Of five chunks of 32 the second goes: 32 do not lie in its 32. The third goes as well: now they do, below."""
    space = AddressSpace(END)
    first = [space.allocate(CHUNK) for _ in range(5)]
    space.free(first[1], CHUNK)
    assert space.allocate(CHUNK) == first[4] - CHUNK
    space.free(first[2], CHUNK)

    assert space.allocate(CHUNK) == first[1]


@pytest.mark.parametrize("name", NAMES)
def test_the_segments_of_a_real_run(name: str) -> None:
    """The context is in the first chunk before them: its end is a chunk's, and the first segment follows it."""
    snapshot = pickle.loads(gzip.decompress((SNAPSHOTS / f"{name}-2.11.0.pickle.gz").read_bytes()))
    entries = [entry for entry in snapshot["device_traces"][0] if entry["action"].startswith("segment")]
    first = entries[0]["addr"]
    space = AddressSpace(first // CHUNK * CHUNK + CHUNK)
    space.allocate(first % CHUNK)
    segments = 0
    for entry in entries:
        if entry["action"] == "segment_alloc":
            assert space.allocate(entry["size"]) == entry["addr"], segments
            segments += 1
        else:
            space.free(entry["addr"], entry["size"])
        space.check()

    assert segments == {"shuffled": 24, "shuffled-gc": 24, "shuffled-max-split": 28, "shuffled-roundup": 23}[name]


def test_nothing_overlaps() -> None:
    chance = random.Random(1)
    space = AddressSpace(END)
    alive: dict[int, int] = {}
    for _ in range(2000):
        if alive and chance.random() < 0.45:
            address = chance.choice(list(alive))
            space.free(address, alive.pop(address))
            continue
        size = 2 * MIB * chance.choice([1, 1, 10, chance.randrange(1, 90)])
        address = space.allocate(size)
        assert address % (2 * MIB) == 0
        assert all(address + size <= other or other + alive[other] <= address for other in alive)
        alive[address] = size
    for address, size in alive.items():
        space.free(address, size)
    space.check()
    assert space.allocate(CHUNK) == END - CHUNK
