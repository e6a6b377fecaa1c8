"""How much of each phase's peak was asked for, and how much the allocator added: rounding, and tails not split off.

    python benchmarks/requested_bytes.py held-out benchmarks/recordings/requested/FILE.jsonl

A line for each case of a list in reference_cases.yaml: its command, and for each phase of two steps the peaks of
allocated and of requested bytes. Cases whose line is there already are skipped. Needs a CUDA device, real or null.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from memcalc.spec.loading import load
from memcalc.step.loop import TrainingRun

CASES = Path(__file__).with_name("reference_cases.yaml")


class Peaks:
    """The two peaks of each phase."""

    def __init__(self) -> None:
        self.phases: dict[str, list[int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `Observer`."""
        torch.cuda.reset_peak_memory_stats()
        yield
        found: dict[str, Any] = torch.cuda.memory_stats()
        self.phases[name] = [found[f"{kind}_bytes.all.peak"] for kind in ("allocated", "requested")]


def main() -> None:
    """Parse the command line, then run one case or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", help="a list in reference_cases.yaml")
    parser.add_argument("lines", type=Path, help="file that lines are appended to")
    parser.add_argument("--case", help="run this one here instead of all in child processes")
    arguments = parser.parse_args()
    if arguments.case is not None:
        run(arguments.case, arguments.lines)
        return
    known = arguments.lines.read_text() if arguments.lines.exists() else ""
    for case in yaml.safe_load(CASES.read_text())[arguments.cases]:
        if json.dumps(case) not in known:
            subprocess.run([sys.executable, *sys.argv, "--case", case], check=False)


def run(case: str, lines: Path) -> None:
    """Run two steps of one case; a case that runs out of memory has no line."""
    preset, *overrides = case.split()
    peaks = Peaks()
    TrainingRun(load(preset, overrides), torch.device("cuda")).execute(2, peaks)
    with lines.open("a") as file:
        file.write(json.dumps({"case": case, "torch": torch.__version__, "phases": peaks.phases}) + "\n")


if __name__ == "__main__":
    main()
