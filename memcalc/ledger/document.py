"""The JSON document of a result: one shape for estimate, trace, dry-run and measure (schema_version 2)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memcalc.ledger.ledger import Ledger
from memcalc.ledger.result import Generation, ModuleResult, Result, Textbook
from memcalc.ledger.row import Row
from memcalc.ledger.verdict import Verdict
from memcalc.spec.limits import Limit
from memcalc.spec.origin import Assumption

SCHEMA_VERSION = 2


def document(result: Result | ModuleResult) -> dict[str, Any]:
    """Return the JSON document of a result, ready for `json.dumps`; a module has no spec and no published formulas."""
    run = result.replayed if isinstance(result, Result) else None
    result = run or result
    ledger = result.ledger
    headline = result.headline
    card = result.card
    return {
        "schema_version": SCHEMA_VERSION,
        "source": result.source,
        "device": result.device,
        "name": result.name,
        "spec": None if run is None else run.spec.model_dump(mode="json"),
        "model": {
            "parameters": result.parameters,
            "trainable_parameters": result.trainable_parameters,
            "buffer_elements": result.buffer_elements,
        },
        "textbook": None if run is None or run.textbook is None else _textbook(run.textbook),
        "peak": {
            "phase": ledger.peak_phase,
            "rank": headline.rank,
            "allocated_bytes": ledger.peak_bytes,
            "reserved_bytes": headline.reserved_bytes,
            "device_bytes": headline.device_bytes,
            "confidence": result.confidence,
        },
        "components": _by_name(ledger.components(ledger.peak_phase)),
        "outside_allocated": {
            "cached_segments": headline.outside.cached_segments,
            "device_context": headline.outside.device_context,
            "communication_library": headline.outside.communication_library,
        },
        "phases": [
            {
                "phase": phase,
                "allocated_bytes": ledger.totals[phase],
                "components": _by_name(ledger.components(phase)),
            }
            for phase in ledger.phases
        ],
        "ledger": [_row(row) for row in ledger.rows],
        "gpu": None
        if card is None
        else {"name": card.name, "advertised_bytes": card.advertised_bytes, "usable_bytes": card.usable_bytes},
        "verdict": result.verdict,
        "fits": result.fits,
        "headroom_bytes": result.headroom_bytes,
        "interval": interval(result.judgement),
        "limits": [limit_row(limit) for limit in result.limits],
        "not_modelled": list(result.not_modelled),
        "assumptions": [] if run is None else [assumption_row(each) for each in run.spec.origin.assumptions],
        "notes": list(result.notes),
        **({} if headline.host is None else {"host": _host(headline.host)}),
        **({} if run is None or run.generation is None else {"kv_cache": _kv_cache(run.generation)}),
    }


def _kv_cache(found: Generation) -> dict[str, Any]:
    return {
        "bytes_per_token": found.bytes_per_token,
        "bytes_per_sequence": found.bytes_per_sequence,
        "largest": None if found.largest is None else asdict(found.largest),
    }


def _textbook(textbook: Textbook) -> dict[str, int]:
    return {
        "parameters": textbook.parameters,
        "model_state_bytes": textbook.model_state_bytes,
        "activation_bytes": textbook.activation_bytes,
    }


def interval(verdict: Verdict | None) -> dict[str, Any] | None:
    """Return a verdict's interval as JSON, or None if the verdict has no interval."""
    if verdict is None or verdict.interval is None:
        return None
    low, high, errors = verdict.interval
    return {
        "low_bytes": low,
        "high_bytes": high,
        "runs": errors.runs,
        "kind": errors.kind,
        "replayed": errors.replayed,
        "median_error": errors.median,
        "worst_error": errors.worst,
    }


def limit_row(limit: Limit) -> dict[str, Any]:
    """Return one limit (something not modelled) as JSON."""
    return {"what": limit.what, "holds_memory": limit.holds_memory, "at_least_bytes": limit.at_least_bytes}


def assumption_row(assumption: Assumption) -> dict[str, Any]:
    """Return one assumption (a value that the config leaves open) as JSON."""
    return {
        "field": assumption.field,
        "what": assumption.what,
        "taken": assumption.taken,
        "otherwise": assumption.otherwise,
        "moved_bytes": assumption.moved_bytes,
    }


def _host(ledger: Ledger) -> dict[str, Any]:
    """Return the host memory of the headline rank at its peak, as JSON."""
    phase = ledger.peak_phase
    return {
        "phase": phase,
        "bytes": ledger.peak_bytes,
        "components": _by_name(ledger.components(phase)),
        "ledger": [_row(row) for row in ledger.rows],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        **row._asdict(),
        "component": row.component.value,
        "shape": list(row.shape),
        "phases": list(row.phases),
    }


def _by_name(components: dict[Any, int]) -> dict[str, int]:
    return {component.value: count for component, count in components.items()}
