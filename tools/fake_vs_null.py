"""Traces on fake tensors compared with the null CUDA device: the summary and table of docs/reports/accuracy.md."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import NamedTuple

from tools.accuracy import RECORDINGS
from tools.markdown import table

FAKE = RECORDINGS / "traces" / "fake-reference.jsonl"  # benchmarks/record_traces.py --cases


class Beside(NamedTuple):
    """One run, recorded on both devices. Bytes: fake, null."""

    run: str
    card: str
    peak: tuple[int, int]
    reserved: tuple[int, int]
    phases: tuple[int, int]  # with identical peaks; all

    @property
    def equal(self) -> bool:
        """Whether no figure differs by a byte."""
        return (
            self.peak[0] == self.peak[1] and self.reserved[0] == self.reserved[1] and self.phases[0] == self.phases[1]
        )

    @property
    def error(self) -> float:
        """By which share the fake peak is over (+) or under (-)."""
        return self.peak[0] / self.peak[1] - 1


@lru_cache(maxsize=1)
def pairs() -> tuple[Beside, ...]:
    """Every run that was recorded on both devices and ended well, in the order of files and lines."""
    fake = {(line["device"], line["case"]): line for line in map(json.loads, FAKE.read_text().splitlines())}
    found = []
    for path in sorted(RECORDINGS.glob("null-*.jsonl")):
        for record in map(json.loads, path.read_text().splitlines()):
            run = record["command"].removeprefix("memcalc measure ").replace("--set ", "")
            card = record["device"]["identifier"].removeprefix("null:")
            traced = fake.get((f"fake:{card}", run))
            if traced is None or record["outcome"] != "done":
                continue
            peaks = {phase["name"]: phase["peak_allocated_bytes"] for phase in record["phases"]}
            same = sum(traced["phases"].get(name) == peak for name, peak in peaks.items())
            reserved = max(phase["peak_reserved_bytes"] for phase in record["phases"])
            found.append(
                Beside(
                    run,
                    card,
                    (max(traced["phases"].values()), max(peaks.values())),
                    (traced["reserved"], reserved),
                    (same, len(peaks)),
                )
            )
    return tuple(found)


def beside_summary() -> str:
    """One sentence."""
    found = pairs()
    equal = sum(run.equal for run in found)
    peaks = sum(run.peak[0] == run.peak[1] for run in found)
    worst = max(abs(run.error) for run in found)
    return (
        f"{len(found)} runs: {equal} are byte-exact, in the peak of every phase and in peak reserved memory; "
        f"{peaks} have the same peak; the largest error of a peak is {worst:.4%}.\n"
    )


def beside_table() -> str:
    """A line for each run that differs in anything."""
    return table(
        [
            *("run", "GPU", "peak, null device", "difference, fake tensors"),
            *("reserved, null device", "difference, fake tensors", "identical phases"),
        ],
        [
            [
                f"`{run.run}`",
                run.card,
                f"{run.peak[1]:,}",
                f"{run.peak[0] - run.peak[1]:+,}",
                f"{run.reserved[1]:,}",
                f"{run.reserved[0] - run.reserved[1]:+,}",
                f"{run.phases[0]} of {run.phases[1]}",
            ]
            for run in pairs()
            if not run.equal
        ],
    )
