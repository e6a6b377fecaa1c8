"""How many estimates a second one core makes, over specs that all differ; and how long the replays of some take.

Reading the YAML is not counted: a search reads once and varies the spec.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time

import memcalc
from memcalc.simulation.simulated_run import SimulatedRun
from memcalc.stream.requests import Requests, replay

PRESETS = ("gpt2", "gpt3", "llama-3-8b", "llama-3-70b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
SEQUENCE_LENGTHS = (128, 256, 512, 1024)
REPLAYED = (
    ("gpt2",),
    ("gpt2", "gradient_accumulation_steps=8"),
    ("llama-3-8b",),
    ("llama-3-8b", "recompute=full"),
    ("llama-3-8b", "implementation=huggingface"),
    ("llama-3-8b", "recipe=pure", "optimizer_implementation=fused"),
    ("gpt3",),
    ("llama-3.1-405b",),
)


def specs(count: int) -> list[memcalc.Spec]:
    """`count` specs in random order, no two identical: presets x sequence lengths x micro-batch sizes."""
    bases = [memcalc.load(name) for name in PRESETS]
    sizes = range(1, 1 + -(-count // (len(bases) * len(SEQUENCE_LENGTHS))))
    variants = []
    for b, s, base in itertools.product(sizes, SEQUENCE_LENGTHS, bases):
        training = base.training.model_copy(update={"micro_batch_size": b, "sequence_length": s})
        variants.append(base.model_copy(update={"training": training}))
    random.Random(0).shuffle(variants)
    return variants[:count]


def replays(rounds: int) -> None:
    """Print how long the requests of some runs take to be written and to be replayed, in milliseconds of processor."""
    for words in REPLAYED:
        spec = memcalc.load(*words)
        SimulatedRun(spec, Requests()).play()  # programs of blocks, which later runs share
        times = []
        for _ in range(rounds):
            start = time.process_time()
            requests = SimulatedRun(spec, Requests()).play()
            written = time.process_time()
            replay(requests)
            times.append((written - start, time.process_time() - written))
        writing, replaying = (1000 * statistics.median(column) for column in zip(*times, strict=True))
        count = sum(len(stretch.script) for stretch in requests.stretches)
        print(
            f"{' '.join(words):60} {writing:5.1f} + {replaying:5.1f} ms, {count:6,} requests, "
            f"{1000 / (writing + replaying):4.0f} replays a second"
        )


def main() -> None:
    """Print the median, best and worst of several rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    rates = []
    for _ in range(options.rounds):
        batch = specs(options.count)
        start = time.perf_counter()
        peaks = [memcalc.estimate(spec).ledger.peak_bytes for spec in batch]
        rates.append(len(peaks) / (time.perf_counter() - start))
    print(
        f"{statistics.median(rates):,.0f} estimates a second "
        f"(median of {options.rounds} rounds of {options.count} different specs; "
        f"{min(rates):,.0f} to {max(rates):,.0f})"
    )
    replays(options.rounds)


if __name__ == "__main__":
    main()
