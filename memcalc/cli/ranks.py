"""`--rank N`: another rank than the worst as the headline."""

from __future__ import annotations

from dataclasses import replace

from memcalc.errors import InputError
from memcalc.ledger.result import Result
from memcalc.report.words import rank_text


def with_headline(result: Result, stage: int) -> Result:
    """The result with pipeline stage `stage` first, and a note if another stage needs more.

    Raises:
        InputError: when there is no such stage.
    """
    chosen = [kind for kind in result.ranks if kind.rank.get("pipeline_stage", 0) == stage]
    if not chosen:
        last = max(kind.rank.get("pipeline_stage", 0) for kind in result.ranks)
        raise InputError(
            f"--rank {stage}: there is no such pipeline stage.",
            f"The stages of this run are 0 to {last}." if last else "This run has stage 0 only.",
        )
    others = [kind for kind in result.ranks if kind is not chosen[0]]
    notes = result.notes
    if chosen[0] is not result.headline:
        notes = (*notes, f"{rank_text(result.headline.rank)} needs more: --all-ranks shows every stage")
    return replace(result, ranks=(chosen[0], *others), notes=notes)
