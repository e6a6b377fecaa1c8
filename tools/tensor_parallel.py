"""Estimates against recordings of layers that PyTorch's DTensor splits: benchmarks/recordings/split."""

from __future__ import annotations

from statistics import median

from tools.markdown import table
from tools.sharded import ShardedRun, recorded_ranks


def split_runs() -> tuple[ShardedRun, ...]:
    """Every recorded rank of split layers."""
    return recorded_ranks("split")


def split_summary() -> str:
    """One sentence."""
    errors = [abs(run.error) for run in split_runs()]
    return f"{len(errors)} runs: median error of the peak {median(errors):.3%}, maximum error {max(errors):.3%}.\n"


def split_table() -> str:
    """A line for each run."""
    rows = [
        [f"`{run.case}`", str(run.ranks), f"{run.measured:,}", f"{run.ledger.peak_bytes:,}", f"{run.error:+.3%}"]
        for run in split_runs()
    ]
    return table(["run", "ranks", "measured bytes", "estimated bytes", "error"], rows)
