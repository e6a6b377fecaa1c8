"""Estimates against peaks that others measured and published: benchmarks/published."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import yaml

import memcalc
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.ledger.row import Row

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "published"
MIB = 2**20


class Peak(NamedTuple):
    """One pipeline stage of a published run: what was measured, and the estimate's ledger."""

    run: str
    t12: bool  # whether formulas.md's test case T12 has the run
    measured: int
    ledger: Ledger

    @property
    def error(self) -> float:
        """How much the estimate is over (+) or under (-), as a share of what was measured."""
        return self.ledger.peak_bytes / self.measured - 1


class Term(NamedTuple):
    """A term of the estimate, and its ledger rows."""

    name: str
    reason: str
    has: Callable[[Row], bool]


TERMS = (
    Term(
        "a tensor of each weight's shape, which autograd passes on",
        "Transformer Engine `module/base.py`: get_dummy_wgrad",
        lambda row: row.tensor.startswith("weight-gradient scratch"),
    ),
    Term(
        "attention output before and after the all-to-all of heads and tokens",
        "Transformer Engine `context_parallel.py`: AttnFuncWithCPAndQKVOA2A saves its own output",
        lambda row: row.tensor == "attention output of the rank's tokens",
    ),
    Term(
        "library workspaces",
        "Transformer Engine `cpp_extensions/gemm.py`; PyTorch `CublasHandlePool.cpp`",
        lambda row: row.component is Component.LIBRARY_WORKSPACE,
    ),
    Term(
        "gradients sent to and received from the neighboring stages",
        "Megatron-LM `schedules.py`: input_tensor_grad, output_tensor_grad",
        lambda row: row.tensor.startswith(("gradient sent", "gradient received")),
    ),
    Term(
        "the gathered input of the output layer, in a persistent buffer",
        "Megatron-LM `tensor_parallel/layers.py`: get_global_memory_buffer",
        lambda row: row.tensor == "gathered input of the output layer",
    ),
    Term(
        "gradients in flight through a layer",
        "the tape of the layer, traversed backward as in autograd",
        lambda row: (
            row.component in (Component.TEMPORARIES, Component.COMMUNICATION_BUFFERS)
            and "gradient" in row.tensor
            and row.module != "engine"
        ),
    ),
    Term(
        "logits, which become their own gradient",
        "Transformer Engine `triton/cross_entropy.py`",
        lambda row: row.component is Component.LOGITS_AND_LOSS and row.tensor == "lm_head output",
    ),
    Term(
        "block rounding and unsplit remainders",
        "PyTorch `CUDACachingAllocator.cpp`",
        lambda row: row.component is Component.BLOCK_ROUNDING,
    ),
)


@lru_cache(maxsize=2)
def megatron_peaks(name: str = "megatron-b200") -> tuple[Peak, ...]:
    """Every stage of the Megatron-LM runs on B200s; those with experts are in "megatron-b200-experts"."""
    return tuple(_megatron_peaks(name))


def _megatron_peaks(name: str) -> Iterator[Peak]:
    document = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    for row in document["rows"]:
        result = memcalc.estimate(megatron_config(document, row))
        ledgers = {rank.rank["pipeline_stage"]: rank.ledger for rank in result.ranks}
        for stage, mib in enumerate(row["mib"]):
            ranks = f"t {row['t']}, p {row['p']}, c {row['c']}" + (f", e {row['e']}" if "e" in row else "")
            run = f"{row['model']}, {row['l']} layers, {ranks}, s {row['s']}"
            where = f", stage {stage}" if row["p"] > 1 else ""
            yield Peak(run + where, row.get("t12", False), round(mib * MIB), ledgers[stage])


def megatron_config(document: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """The configuration of one row."""
    common = document["common"]
    sizes = document["models"][row["model"]]
    return {
        "name": row["model"],
        "model": common["model"] | sizes | {"num_layers": row["l"], "max_position_embeddings": row["s"]},
        "training": common["training"] | {"sequence_length": row["s"]},
        "parallelism": common["parallelism"]
        | {
            "tensor_parallel": row["t"],
            "pipeline_parallel": row["p"],
            "context_parallel": row["c"],
            "expert_parallel": row.get("e", 1),
            "data_parallel": row["N"],
            "sequence_parallel": row["t"] > 1,
        },
        "hardware": common["hardware"],
    }


def without(peak: Peak, term: Term) -> float:
    """The error that the estimate would have if it did not count a term."""
    totals = dict(peak.ledger.totals)
    for row in peak.ledger.rows:
        if term.has(row):
            for phase in row.phases:
                totals[phase] -= row.bytes
    return max(totals.values()) / peak.measured - 1


def mean_and_worst(errors: list[float]) -> tuple[float, float]:
    """Of the absolute errors."""
    absolute = [abs(error) for error in errors]
    return mean(absolute), max(absolute)
