"""`--rank N`: another rank than the worst as the headline. `--world-size N`: one rank of N."""

from __future__ import annotations

from dataclasses import replace

from memcalc.errors import InputError
from memcalc.ledger.result import Result
from memcalc.report.labels import rank_text


def with_headline(result: Result, stage: int) -> Result:
    """Return the result with pipeline stage `stage` as its headline, and a note if another stage needs more.

    Raises:
        InputError: when there is no such stage.
    """
    chosen = [kind for kind in result.ranks if kind.rank.get("pipeline_stage", 0) == stage]
    if not chosen:
        last = max(kind.rank.get("pipeline_stage", 0) for kind in result.ranks)
        raise InputError(
            f"--rank {stage} is not a pipeline stage.",
            f"Choose from 0 to {last}." if last else "Leave --rank out: this run has only stage 0.",
        )
    others = [kind for kind in result.ranks if kind is not chosen[0]]
    notes = result.notes
    if chosen[0] is not result.headline:
        notes = (*notes, f"{rank_text(result.headline.rank)} needs more: --all-ranks shows every stage")
    return replace(result, ranks=(chosen[0], *others), notes=notes)


def one_of(world_size: int, tensor_parallel: int) -> tuple[str, ...]:
    """Return overrides for one rank of N: `tensor_parallel` ranks split layers, FSDP2 shards over the rest.

    Raises:
        InputError: when they cannot be put into such groups.
    """
    if world_size % tensor_parallel:
        raise InputError(
            f"--world-size {world_size} is not a multiple of tensor_parallel = {tensor_parallel}.",
            "Use a multiple of tensor_parallel: the world size is data_parallel x tensor_parallel.",
            "--world-size",
        )
    groups = world_size // tensor_parallel
    return () if groups == 1 else (f"data_parallel={groups}", "engine=fsdp2", "zero_stage=3")
