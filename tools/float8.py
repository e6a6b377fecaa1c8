"""Estimates against recordings of torchao's linear layers in 8 bits: benchmarks/recordings/float8."""

from __future__ import annotations

from statistics import median

from tools.markdown import table
from tools.sharded import ShardedRun, recorded_ranks


def float8_runs() -> tuple[ShardedRun, ...]:
    """Every recorded rank."""
    return recorded_ranks("float8")


def float8_summary() -> str:
    """One sentence."""
    known, held_out = (
        [abs(run.error) for run in float8_runs() if run.held_out is chosen_before] for chosen_before in (False, True)
    )
    return (
        f"{len(held_out)} held-out runs, chosen before they were recorded: median error of the peak "
        f"{median(held_out):.3%}, maximum error {max(held_out):.3%}; {len(known)} that the formulas were written "
        f"against: {median(known):.3%} and {max(known):.3%}.\n"
    )


def float8_table() -> str:
    """A line for each run."""
    rows = [
        [f"`{run.case}`", str(run.ranks), f"{run.measured:,}", f"{run.ledger.peak_bytes:,}", f"{run.error:+.3%}"]
        for run in sorted(float8_runs(), key=lambda run: not run.held_out)
    ]
    return table(["run", "ranks", "measured bytes", "estimated bytes", "error"], rows)
