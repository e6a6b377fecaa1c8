"""JSON Schemas for editors and for readers of the JSON, generated from the Pydantic models."""

from __future__ import annotations

from typing import Any

from memcalc.spec.fields import BLOCKS, HOME, MODEL_SOURCES, NESTED, SYMBOLS
from memcalc.spec.model import Block
from memcalc.spec.recipes import ALIASES

_DIALECT = "https://json-schema.org/draft/2020-12/schema"

# What no default and no other field gives; a preset or a Hugging Face config does.
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")

_SOURCES = {
    "preset": "a shipped model by name (see `memcalc models`) or hub id; fields of `model` override it",
    "hf_config": "a Hugging Face config.json or its directory, relative to this file, or a hub id; fields of `model` "
    "override it",
}


def config_schema() -> dict[str, Any]:
    """The schema of a configuration: what users write, so nothing that is derived is required."""
    blocks = {name: _block(name) for name in BLOCKS}
    for name, model in NESTED.items():
        # What a block of the model leaves out is missing; what one of training leaves out is derived.
        inner = _loosened(model.model_json_schema(), keep_required=HOME[name] == "model")
        blocks[HOME[name]]["properties"][name] = {"anyOf": [inner, {"type": "null"}]}
    sources = {name: _text(words) for name, words in _SOURCES.items()}
    blocks["model"]["properties"] |= sources
    names_model = [{"required": [name]} for name in MODEL_SOURCES]
    sizes = {"allOf": [{"anyOf": [{"required": [name]} for name in _spellings(size)]} for size in _SIZES]}
    return {
        "$schema": _DIALECT,
        "title": "memcalc configuration",
        "description": "A training run of a large language model; see docs/reference/configuration.md of memcalc.",
        "type": "object",
        "properties": {"name": _text("shown in reports"), **sources, **blocks},
        "additionalProperties": False,
        "anyOf": [
            *names_model,
            {"required": ["model"], "properties": {"model": {"anyOf": [*names_model, sizes]}}},
        ],
    }


def result_schema() -> dict[str, Any]:
    """The schema of the JSON that commands print with --format json: one of several documents."""
    options = [model.model_json_schema(mode="serialization") for model in documents().values()]
    definitions: dict[str, Any] = {}
    for option in options:
        own = option.pop("$defs")
        clashes = [name for name in own if definitions.get(name, own[name]) != own[name]]
        assert not clashes, f"two models of one name: {clashes}"
        definitions |= own
    return {"$schema": _DIALECT, "title": "memcalc result", "anyOf": options, "$defs": definitions}


def documents() -> dict[str, type[Block]]:
    """What commands print as JSON, by command; a run that is estimated or traced is a plain `estimate`."""
    from memcalc.cells.schema import CellsDocument
    from memcalc.checking.schema import CheckDocument
    from memcalc.events.schema import TimelineDocument
    from memcalc.fitting.schema import FitDocument
    from memcalc.ledger.schema import ComparedDocument, Document
    from memcalc.nullcuda.schema import DryRunDocument
    from memcalc.planning.schema import RecomputeDocument
    from memcalc.sweeping.schema import SweepDocument

    return {
        "estimate": Document,
        "measure": ComparedDocument,
        "dry-run": DryRunDocument,
        "check": CheckDocument,
        "fit": FitDocument,
        "sweep": SweepDocument,
        "sweep --by": CellsDocument,
        "recompute": RecomputeDocument,
        "timeline": TimelineDocument,
    }


def _block(name: str) -> dict[str, Any]:
    block = _loosened(BLOCKS[name].model_json_schema(), keep_required=False)
    for symbol, field in SYMBOLS.get(name, {}).items():
        block["properties"][symbol] = block["properties"][field]
    if name == "training":
        recipes = next(option for option in block["properties"]["recipe"]["anyOf"] if "enum" in option)
        recipes["enum"] += list(ALIASES)
    return block


def _loosened(schema: dict[str, Any], *, keep_required: bool) -> dict[str, Any]:
    """A block as it may be written: a key without a value is as good as none."""
    schema.pop("$defs", None)  # the nested blocks, which are put in by name
    if not keep_required:
        schema.pop("required", None)
    for name, field in schema["properties"].items():
        schema["properties"][name] = _nullable(field)
    return schema


def _nullable(field: dict[str, Any]) -> dict[str, Any]:
    field.pop("title", None)
    outer: dict[str, Any] = {key: field.pop(key) for key in ("description", "default") if key in field}
    if outer.get("default", ...) is None:
        del outer["default"]
    options = field.get("anyOf", [field])
    return {**outer, "anyOf": [*(option for option in options if option != {"type": "null"}), {"type": "null"}]}


def _spellings(field: str) -> list[str]:
    return [field, *(symbol for symbol, name in SYMBOLS["model"].items() if name == field)]


def _text(description: str) -> dict[str, Any]:
    return {"description": description, "anyOf": [{"type": "string"}, {"type": "null"}]}
