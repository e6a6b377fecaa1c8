"""JSON Schemas for editors and for readers of the JSON, generated from the models and the documents."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import get_original_bases, is_typeddict

from memcalc.documents.cells import CellsDocument
from memcalc.documents.check import CheckDocument, DiffDocument
from memcalc.documents.dry_run import DryRunDocument, DryRunSweepDocument
from memcalc.documents.fit import FitDocument
from memcalc.documents.measure import ComparedDocument, RecordsDocument, SuiteDocument
from memcalc.documents.oom import OomDocument
from memcalc.documents.recompute import ChainDocument, RecomputeDocument
from memcalc.documents.replay import ReplayDocument
from memcalc.documents.result import Document, SourcesDocument
from memcalc.documents.sweep import SweepDocument
from memcalc.documents.timeline import TimelineDocument
from memcalc.spec.fields import BLOCKS, HOME, MODEL_SOURCES, NESTED, SYMBOLS
from memcalc.spec.loading import TEACHER
from memcalc.spec.recipes import ALIASES

# A document has the keys of its type and no others; these hold for the dictionaries inside it, too.
_EXACT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

_DIALECT = "https://json-schema.org/draft/2020-12/schema"

# What no default and no other field gives; a preset or a Hugging Face config does.
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")

_SOURCES = {
    "preset": "a shipped model by name (see `memcalc models`) or hub id; fields of `model` override it",
    "hf_config": "a Hugging Face config.json or its directory, relative to this file, or a hub id; fields of `model` "
    "override it",
}

_DOCUMENTS: dict[str, Any] = {
    "estimate": Document,
    "estimate --measure": SourcesDocument,
    "measure": ComparedDocument,
    "measure --suite": SuiteDocument,
    "measure --compare": RecordsDocument,
    "dry-run": DryRunDocument,
    "dry-run --sweep": DryRunSweepDocument,
    "check": CheckDocument,
    "diff": DiffDocument,
    "fit": FitDocument,
    "sweep": SweepDocument,
    "sweep --by": CellsDocument,
    "recompute": RecomputeDocument,
    "recompute CHAIN": ChainDocument,
    "replay": ReplayDocument,
    "oom": OomDocument,
    "timeline": TimelineDocument,
}


def config_schema() -> dict[str, Any]:
    """Return the schema of a configuration as users write it: derived fields are not required."""
    blocks = {name: _block(name) for name in BLOCKS}
    for name, model in NESTED.items():
        # What a block of the model leaves out is missing; what one of training leaves out is derived.
        inner = _loosened(model.model_json_schema(), keep_required=HOME[name] == "model")
        blocks[HOME[name]]["properties"][name] = {"anyOf": [inner, {"type": "null"}]}
    sources = {name: _text(words) for name, words in _SOURCES.items()}
    blocks["model"]["properties"] |= sources
    teacher = blocks["training"]["properties"][TEACHER]
    teacher["anyOf"] = [{"type": "string"}, {"$ref": "#/properties/model"}, {"type": "null"}]
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
    """Return the schema of the JSON that commands print with --format json: one of several documents."""
    options = [adapter.json_schema(mode="serialization") for adapter in documents().values()]
    definitions: dict[str, Any] = {}
    for option in options:
        own = option.pop("$defs", {})
        clashes = [name for name in own if definitions.get(name, own[name]) != own[name]]
        assert not clashes, f"two models of one name: {clashes}"
        definitions |= own
    kinds = _typed_dictionaries()
    for found in (*options, *definitions.values()):
        if found["title"] in kinds:
            _describe_inherited(found["properties"], kinds[found["title"]])
    return {"$schema": _DIALECT, "title": "memcalc result", "anyOf": options, "$defs": definitions}


def _typed_dictionaries() -> dict[str, type]:
    """Return the types of all documents and of their parts, by name."""
    modules = {sys.modules[document.__module__] for document in _DOCUMENTS.values()}
    return {name: kind for module in modules for name, kind in vars(module).items() if is_typeddict(kind)}


def _describe_inherited(properties: dict[str, Any], kind: type) -> None:
    """Add the descriptions of inherited keys: Pydantic reads those of the class itself alone."""
    for base in get_original_bases(kind):
        if not is_typeddict(base):
            continue
        inherited = TypeAdapter(with_config(_EXACT)(base)).json_schema(mode="serialization")["properties"]
        _describe_inherited(inherited, base)
        for name, found in inherited.items():
            if "description" in found:
                properties[name].setdefault("description", found["description"])


@cache  # Pydantic compiles each model: together most of a second
def documents() -> dict[str, TypeAdapter[Any]]:
    """Return the JSON documents by command; estimated and traced runs share the document of `estimate`."""
    return {command: TypeAdapter(with_config(_EXACT)(document)) for command, document in _DOCUMENTS.items()}


def _block(name: str) -> dict[str, Any]:
    block = _loosened(BLOCKS[name].model_json_schema(), keep_required=False)
    for symbol, field in SYMBOLS.get(name, {}).items():
        block["properties"][symbol] = block["properties"][field]
    if name == "training":
        recipes = next(option for option in block["properties"]["recipe"]["anyOf"] if "enum" in option)
        recipes["enum"] += list(ALIASES)
    return block


def _loosened(schema: dict[str, Any], *, keep_required: bool) -> dict[str, Any]:
    """Return a block's schema that also accepts a key without a value, which is the same as no key."""
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
