"""How many events a second one core replays through the allocator.

Two streams: training steps of a decoder in miniature (allocations of forward held for backward, temporaries in
between, the optimizer's foreach lists), and allocations and frees in random order and of random size, which no cache
likes. Seconds are those of the processor, so that what else the machine does counts little.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import time
from collections.abc import Iterator

from memcalc.allocator import replay
from memcalc.events import Event, EventType

MIB = 2**20
SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:512", "roundup_power2_divisions:4")


def training(count: int, layers: int = 32) -> list[Event]:
    """Whole training steps, at least `count` events: a layer keeps ten tensors and makes six temporaries."""
    events: list[Event] = []
    number = 0

    def alloc(size: int) -> int:
        nonlocal number
        number += 1
        events.append(Event(EventType.ALLOC, number, size))
        return number

    def free(*storages: int) -> None:
        events.extend(Event(EventType.FREE, storage) for storage in storages)

    hidden, mlp, statistic, weights = 16 * MIB, 56 * MIB, 8192, (32 * MIB, 8 * MIB, 32 * MIB, 112 * MIB, 16384)
    for _ in range(layers):
        for size in weights:
            alloc(size)
    while len(events) < count:
        kept = []
        for _ in range(layers):
            for size in (hidden, statistic, 3 * hidden, hidden, statistic, hidden, mlp, mlp, mlp, hidden):
                temporary = alloc(size // 2 + 512)
                kept.append(alloc(size))
                free(temporary)
        gradients = []
        for layer in range(layers):
            for at in range(10):
                first, second = alloc(hidden), alloc(mlp)
                free(kept[-1 - 10 * layer - at], second, first)
            gradients += [alloc(size) for size in weights]
        lists = [alloc(size) for size in weights * layers]
        free(*lists, *gradients)
    return events


def shuffled(count: int, living: int = 2000) -> list[Event]:
    """Sizes from 1 byte to 64 MiB, evenly over the powers of two, freed in random order."""
    generator = random.Random(0)
    events: list[Event] = []
    alive: list[int] = []
    for number in range(count):
        if len(alive) > living or (alive and generator.random() < 0.45):
            at = generator.randrange(len(alive))
            alive[at], alive[-1] = alive[-1], alive[at]
            events.append(Event(EventType.FREE, alive.pop()))
        else:
            alive.append(number)
            events.append(Event(EventType.ALLOC, number, int(2 ** generator.uniform(0, 26))))
    return events


def rates(events: list[Event], config: str, rounds: int) -> Iterator[float]:
    """Events a second, once a round."""
    for _ in range(rounds):
        start = time.process_time()
        replay(events, config)
        yield len(events) / (time.process_time() - start)


def main() -> None:
    """Print the median, worst and best of several rounds for each stream and setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="show where the time goes instead")
    options = parser.parse_args()

    streams = {"training": training(options.count), "shuffled": shuffled(options.count)}
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(replay, streams["training"])
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)
        return
    for name, events in streams.items():
        for config in SETTINGS:
            measured = list(rates(events, config, options.rounds))
            print(
                f"{name:8} {config or 'defaults':26} {statistics.median(measured):9,.0f} events a second "
                f"({min(measured):,.0f} to {max(measured):,.0f}, {len(events):,} events)"
            )


if __name__ == "__main__":
    main()
