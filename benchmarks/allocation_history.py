"""Every allocation of one phase of a training step, in order, with where it came from: for finding a missing term.

    python benchmarks/allocation_history.py backward_2 gpt2 b=2 s=1024 recipe=pure attention=flash

Each line: + (allocated) or - (freed), requested bytes, bytes alive in this phase after it, tensor's number, where. The
peak is marked. Backward's frames are C++ (slow to look up); other phases' are Python. Needs a CUDA device,
real or null.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memcalc.spec.loading import load
from memcalc.step.loop import TrainingRun

ENTRIES = 1_000_000  # of the ring buffer; more than any phase of any case makes
BORING = ("torch/nn/modules/module.py", "torch/utils/", "memcalc/step/loop.py", "benchmarks/", "transformers/utils/")


class History:
    """Records one phase of a run."""

    def __init__(self, wanted: str) -> None:
        self.wanted = wanted
        self.events: list[dict[str, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `Observer`."""
        if name != self.wanted:
            yield
            return
        stacks = "all" if name.startswith("backward") else "python"
        torch.cuda.memory._record_memory_history("all", "all", stacks, ENTRIES)  # noqa: SLF001 -- its only name
        yield
        self.events += torch.cuda.memory._snapshot()["device_traces"][0]  # noqa: SLF001 -- PyTorch has no public function
        torch.cuda.memory._record_memory_history(None)  # noqa: SLF001 -- PyTorch has no public function


def place(frames: list[dict[str, Any]]) -> str:
    """The frames that say most: the autograd node and the operator, or the innermost lines of Python."""
    python = [
        f"{frame['filename'].rpartition('site-packages/')[2].rpartition('/main/')[2]}:{frame['line']} {frame['name']}"
        for frame in frames
        if frame["filename"].endswith(".py") and not any(part in frame["filename"] for part in BORING)
    ]
    native = [frame["name"].partition("(")[0] for frame in frames if not frame["filename"].endswith(".py")]
    nodes = [name for name in native if ("Backward" in name and name.endswith("::apply")) or "AccumulateGrad" in name]
    operators = [name for name in native if name.startswith(("at::_ops::", "at::native::"))]
    return " < ".join([*operators[:1], *operators[-1:], *nodes[:1], *python[:2]])


def main() -> None:
    """Parse the command line, run two steps, print the phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", help="e.g. loss_1, backward_2, optimizer_step_1")
    parser.add_argument("source", help="a preset or file")
    parser.add_argument("overrides", nargs="*", help="field=value")
    parser.add_argument("--at-least", type=int, default=0, help="leave out what is smaller than this many bytes")
    arguments = parser.parse_args()
    history = History(arguments.phase)
    run = TrainingRun(load(arguments.source, arguments.overrides), torch.device("cuda"))
    run.execute(int(arguments.phase.rpartition("_")[2]), history)
    report(history.events, arguments.at_least)


def report(events: list[dict[str, Any]], at_least: int) -> None:
    """Print the events with a running level; what was there before the phase counts as zero."""
    lines: list[tuple[int, str]] = []
    numbers: dict[int, int] = {}
    level = top = 0
    for count, event in enumerate(events):
        allocated = event["action"] == "alloc"
        if not allocated and event["action"] != "free_completed":
            continue
        if allocated:
            numbers[event["addr"]] = count
        level += event["size"] if allocated else -event["size"]
        top = max(top, level)
        if event["size"] >= at_least:
            name = f"#{numbers[event['addr']]}" if event["addr"] in numbers else "earlier"
            where = place(event["frames"]) if allocated else ""
            lines.append((level, f"{'+' if allocated else '-'} {event['size']:>14,} {level:>16,} {name:>8} {where}"))
    print(f"highest moment: {top:,} bytes above the start of the phase")
    for at, line in lines:
        print(line + ("   <== highest" if at == top else ""))


if __name__ == "__main__":
    main()
