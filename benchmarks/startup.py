"""How long a whole `memcalc estimate` takes: without and with its replay, and against importing its dependencies.

The commands take turns, so that whatever else the machine does falls on all alike.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

BASELINE = [sys.executable, "-c", "import typer, rich.table, rich.console, pydantic, yaml"]
MEMCALC = [sys.executable, "-m", "memcalc", "estimate"]
CONFIG = "gpt3.yaml"
# The same command with formulas and recorded runs in place of the replay.
FORMULAS = """
import sys
import memcalc.verdict.judge
from memcalc.cli.app import main

memcalc.verdict.judge.can_replay = lambda spec: False
sys.argv = ["memcalc", "estimate", *sys.argv[1:]]
sys.exit(main())
"""
REPLAYED = ("gpt2", "llama-3-8b", "gpt3", "llama-3.1-405b")


def seconds(command: list[str]) -> float:
    """Wall-clock seconds of one run of a command."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def medians(first: list[str], second: list[str], runs: int) -> tuple[float, float, float]:
    """The medians of two commands that take turns, and of the ratio of the second to the first."""
    for command in (first, second):
        seconds(command)  # bytecode and disk caches
    pairs = [(seconds(first), seconds(second)) for _ in range(runs)]
    one, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    return one, other, statistics.median(after / before for before, after in pairs)


def main() -> None:
    """Print medians and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs

    baseline, command, ratio = medians(BASELINE, [*MEMCALC, CONFIG], runs)
    print(f"importing typer, rich, pydantic, yaml  {baseline * 1000:6.0f} ms  (medians of {runs})")
    print(f"memcalc estimate {CONFIG}             {command * 1000:6.0f} ms, ratio {ratio:.2f}")
    for name in REPLAYED:
        formula, replayed, ratio = medians([sys.executable, "-c", FORMULAS, name], [*MEMCALC, name], runs)
        times = f"by formula {formula * 1000:5.0f} ms, with its replay {replayed * 1000:5.0f} ms"
        print(f"memcalc estimate {name:15} {times}, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
