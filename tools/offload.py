"""Estimates against recordings of offload: benchmarks/recordings/offload, zero-offload and activation-offload."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import memcalc
from memcalc.ledger.component import Component
from tools.accuracy import RECORDINGS
from tools.markdown import table
from tools.sharded import ShardedRun, recorded_ranks


class OffloadedRun(NamedTuple):
    """One recorded rank, and the pinned memory of the host that PyTorch counted after the last step."""

    run: ShardedRun
    pinned_measured: int
    pinned_estimated: int
    host_estimated: int  # at the peak, pageable memory too


def offloaded_runs() -> tuple[OffloadedRun, ...]:
    """Every recorded rank."""
    return _recorded("offload", (Component.WEIGHTS, Component.GRADIENTS, Component.BLOCK_ROUNDING))


def zero_runs() -> tuple[OffloadedRun, ...]:
    """Every recorded rank of DeepSpeed's offload, which pins weights regardless of its options."""
    return _recorded("zero-offload", (Component.WEIGHTS, Component.BLOCK_ROUNDING))


def activation_runs() -> tuple[OffloadedRun, ...]:
    """Every recorded run of save_on_cpu; the pinned memory is that between forward and backward."""
    return _recorded("activation-offload", (Component.ACTIVATIONS, Component.LOGITS_AND_LOSS, Component.BLOCK_ROUNDING))


def _recorded(folder: str, kinds: tuple[Component, ...]) -> tuple[OffloadedRun, ...]:
    """The ranks of a directory; `kinds`: what of the host's memory is pinned, where anything is."""
    found = []
    paths = sorted((RECORDINGS / folder).glob("*.jsonl"))
    lines = [line for path in paths for line in path.read_text().splitlines()]
    for run, record in zip(recorded_ranks(folder), map(json.loads, lines), strict=True):
        spec = memcalc.load(record["spec"])
        host = memcalc.estimate(spec).headline.host
        assert host is not None
        saves = spec.training.offload_activations
        after = host.components("zero_grad_2" if saves == "none" else "backward_2")
        pins = spec.parallelism.offload_pin_memory or spec.parallelism.engine == "deepspeed" or saves == "pinned"
        pinned = sum(after.get(kind, 0) for kind in kinds) if pins else 0
        found.append(OffloadedRun(run, record["pinned_bytes"], pinned, host.peak_bytes))
    return tuple(found)


def offload_summary() -> str:
    """One sentence."""
    runs = offloaded_runs()
    errors = [abs(each.run.error) for each in runs]
    same = sum(each.pinned_measured == each.pinned_estimated for each in runs)
    return (
        f"{len(errors)} runs: median error of the GPU's peak {median(errors):.3%}, maximum error {max(errors):.3%}; "
        f"pinned host memory is byte-exact in {same}.\n"
    )


def offload_table(runs: Callable[[], tuple[OffloadedRun, ...]] = offloaded_runs) -> str:
    """A line for each run."""
    rows = [
        [
            f"`{run.case}`",
            str(run.ranks),
            f"{run.measured:,}",
            f"{run.ledger.peak_bytes:,}",
            f"{run.error:+.3%}",
            f"{measured:,}",
            f"{estimated:,}",
            f"{host:,}",
        ]
        for run, measured, estimated, host in runs()
    ]
    of_host = ["pinned bytes, measured", "estimated", "host peak, estimated"]
    return table(["run", "ranks", "measured bytes", "estimated bytes", "error", *of_host], rows)


TABLES: dict[str, Callable[..., str]] = {
    "offload": offload_table,
    "offload-summary": offload_summary,
    "activation-offload": partial(offload_table, activation_runs),
    "zero-offload": partial(offload_table, zero_runs),
}
