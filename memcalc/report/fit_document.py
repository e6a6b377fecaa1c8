"""JSON of `fit`. Bytes are integers, seconds are numbers."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from memcalc.exporters.completing import Export
from memcalc.fitting.answer import Fit, Nearest
from memcalc.fitting.costs import TERMS, Costs
from memcalc.fitting.maxima import Maximum
from memcalc.fitting.offers import Offer
from memcalc.fitting.ranking import Best, Ranking
from memcalc.ledger.document import SCHEMA_VERSION, interval, limit_row
from memcalc.ledger.result import Result
from memcalc.report.change_document import change_document
from memcalc.spec.spec import Spec
from memcalc.verdict.reasons import Reason, Remedy

_SPREAD = (
    "tensor_parallel",
    "sequence_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline_parallel",
    "schedule",
    "virtual_stages",
    "data_parallel",
    "data_parallel_replicate",
    "zero_stage",
    "engine",
)


def fit_document(answer: Fit, written: Export | None = None, file: Path | None = None) -> dict[str, Any]:
    """Return the result with every layout that fits, the cheapest first.

    Args:
        answer: the result.
        written: a layout as another program's file; None: none was written.
        file: where that was written to.
    """
    system = answer.system
    return {
        "schema_version": SCHEMA_VERSION,
        "source": "fit",
        "name": answer.name,
        "verdict": answer.verdict,
        "fits": answer.fits,
        "gpu": {"name": answer.card.name, "usable_bytes": answer.card.usable_bytes},
        "gpus": answer.gpus,
        "system": {
            "node": system.node,
            "link": system.link,
            "link_bytes_per_second": system.link_bytes,
            "network_bytes_per_second": system.nic_bytes,
            "flops": system.flops,
            "source": system.source,
            "assumed": system.assumed or None,
        },
        "sequences_per_step": answer.sequences,
        "as_it_is": None if answer.asked is None else _sized(answer.asked),
        "not_as_it_is": answer.unasked or None,
        "layouts": None if answer.ranking is None else _layouts(answer, answer.ranking),
        "maxima_of": None if answer.base is None else layout_fields(answer.base),
        "maxima": {name: _maximum(found) for name, found in answer.maxima.items()},
        "minima": _minima(answer),
        "nearest": [_nearest(found) for found in answer.nearest],
        "reason": None if answer.reason is None else _reason(answer.reason),
        "written": None
        if written is None or file is None
        else {"file": str(file), "settings": list(written.settings), "command": shlex.join(written.command(file))},
        "notes": list(answer.notes),
        "pruned": [
            {"choice": choice or None, "reason": reason, "times": times}
            for (choice, reason), times in answer.pruned.items()
        ],
        "cost_terms": {name: {"meaning": meaning, "source": source} for name, (meaning, source) in TERMS.items()},
    }


def layout_fields(spec: Spec) -> dict[str, Any]:
    """The fields of a layout under their names in a configuration."""
    training = spec.training
    recompute = training.recompute
    return {field: getattr(spec.parallelism, field) for field in _SPREAD} | {
        "recompute": recompute if isinstance(recompute, str) else list(recompute),
        "micro_batch_size": training.micro_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
    }


def _layouts(answer: Fit, ranking: Ranking) -> dict[str, Any]:
    return {
        "tried": ranking.tried,
        "undecided": ranking.undecided,
        "fitting": [
            {**layout_fields(found.spec), "device_bytes": found.device_bytes, "cost_seconds": _costs(found.costs)}
            for found in ranking.fitting
        ],
        "best": [_best(found) for found in answer.best],
    }


def _best(found: Best) -> dict[str, Any]:
    return layout_fields(found.result.spec) | _sized(found.result) | {"cost_seconds": _costs(found.costs)}


def _costs(costs: Costs) -> dict[str, float]:
    return costs._asdict() | {"total": costs.total}


def _sized(result: Result) -> dict[str, Any]:
    ledger, headline = result.ledger, result.headline
    return {
        "verdict": result.verdict,
        "fits": result.fits,
        "interval": interval(result.decision),
        "limits": [limit_row(limit) for limit in result.limits if limit.holds_memory],
        "phase": ledger.peak_phase,
        "pipeline_stage": headline.rank["pipeline_stage"],
        "allocated_bytes": ledger.peak_bytes,
        "device_bytes": headline.device_bytes,
        "components": {part.value: size for part, size in ledger.components(ledger.peak_phase).items()},
        "outside_allocated": {
            "cached_segments": headline.outside.cached_segments,
            "device_context": headline.outside.device_context,
            "communication_library": headline.outside.communication_library,
        },
    }


def _maximum(found: Maximum) -> dict[str, Any]:
    return {
        "value": found.value,
        "close": found.is_close,
        "at_most": found.is_at_most,
        "now": found.now,
        "step": found.step or None,
        "next_value": found.next_value,
        "next_device_bytes": found.next_bytes,
        "next_verdict": None if found.next_verdict is None else found.next_verdict.answer,
        "end": found.end or None,
        "neighbours_tried": found.above,
        "smaller_that_do_not_fit": list(found.gaps),
        "parameters": found.parameters,
        "set": list(found.words),
        "note": found.note or None,
        "estimate": None if found.result is None else _sized(found.result),
    }


def _minima(answer: Fit) -> dict[str, Any]:
    wanted = answer.question.minimize
    if wanted == "gpus":
        return {"gpus": answer.fewest, "may_be_fewer": answer.may_be_fewer}
    if wanted == "gpu_kind":
        return {
            "gpu_kind": answer.smallest.card.name if answer.smallest else None,
            "cards": [
                {
                    "name": sized.card.name,
                    "device_bytes": sized.device_bytes,
                    "usable_bytes": sized.card.usable_bytes,
                    "verdict": sized.verdict.answer,
                    "fits": sized.verdict.fits,
                    "lacks": sized.lacks or None,
                }
                for sized in answer.cards
            ],
        }
    if wanted == "cost":
        return {"cost": [_offer(offer) for offer in answer.offers]}
    if wanted == "recompute":
        found = answer.least_recompute
        if found is None:
            full = answer.all_recomputed
            return {"recompute": None, "all_recomputed": None if full is None else _sized(full)}
        plan = found.recompute if isinstance(found.recompute, str) else list(found.recompute)
        return {"recompute": {"plan": plan, "layers": found.layers, "of": found.of, "device_bytes": found.device_bytes}}
    return {}


def _offer(offer: Offer) -> dict[str, Any]:
    found = offer.found
    return {
        "name": offer.card.name,
        "price_per_hour": offer.price,
        "verdict": offer.verdict,
        "lacks": offer.lacks or None,
        "may_be_fewer": offer.may_be_fewer,
        "gpus": None if found is None else found.gpus,
        "all_per_hour": offer.hourly,
        "per_million_tokens": None if found is None else offer.of_tokens,
        "layout": None if found is None else layout_fields(found.best[0].result.spec),
    }


def _nearest(found: Nearest) -> dict[str, Any]:
    change = found.change
    return {
        **change_document(change),
        "card_time_per_token": None if found.slowdown is None else 1 + found.slowdown,
        "device_bytes": change.needed,
        "host_bytes": found.host_bytes,
        "node_host_bytes": found.node_host_bytes,
    }


def _reason(reason: Reason) -> dict[str, Any]:
    remedy = reason.remedy
    return {
        "phase": reason.phase,
        "largest": {part.value: size for part, size in reason.largest},
        "optimizer_lists": reason.lists,
        "fragmented": reason.fragmented,
        "remedy": None if remedy is None else {"set": list(remedy.overrides), **_remedy(remedy)},
    }


def _remedy(remedy: Remedy) -> dict[str, Any]:
    return {
        "device_bytes": remedy.device_bytes,
        "cost": remedy.cost,
        "host_bytes": remedy.host_bytes,
        "node_host_bytes": remedy.node_host_bytes,
    }
