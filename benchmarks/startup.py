"""How long a whole `memcalc estimate gpt3.yaml` takes, against merely importing its dependencies.

The two commands take turns, so that whatever else the machine does falls on both alike.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

BASELINE = [sys.executable, "-c", "import typer, rich.table, rich.console, pydantic, yaml"]
COMMAND = [sys.executable, "-m", "memcalc", "estimate", "gpt3.yaml"]


def seconds(command: list[str]) -> float:
    """Wall-clock seconds of one run of a command."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Print the two medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs

    for command in (BASELINE, COMMAND):
        seconds(command)  # bytecode and disk caches
    pairs = [(seconds(BASELINE), seconds(COMMAND)) for _ in range(runs)]
    baseline, command = (statistics.median(column) for column in zip(*pairs, strict=True))

    print(f"importing typer, rich, pydantic, yaml  {baseline * 1000:6.0f} ms  (median of {runs})")
    print(f"memcalc estimate gpt3.yaml             {command * 1000:6.0f} ms  (median of {runs})")
    print(f"ratio                                  {command / baseline:6.2f}")


if __name__ == "__main__":
    main()
