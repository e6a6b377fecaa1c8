"""Defaults of the model classes that a NeMo 2 recipe names, and the vocabulary of its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from memcalc.frameworks.draft import Draft
from memcalc.importers.file_format import Meaning
from memcalc.importers.vocabulary import entries_of, place_vocabulary

_CLASSES = Path(__file__).resolve().parents[2] / "data" / "nemo.yaml"
DEFAULT = "GPT2BPETokenizer"  # default of data modules


def place_class(draft: Draft, meanings: Mapping[str, Meaning]) -> None:
    """Set the defaults of the model's class; the file's own fields take precedence.

    Args:
        draft: the configuration being read; the class is its fact `class`.
        meanings: the meanings of the fields of `model.config`.
    """
    name = str(draft.facts.get("class", "")).rpartition(".")[2]
    if not name:
        return
    fields = _class_fields(name)
    if fields is None:
        draft.notes.append(f"the model of {name} is unknown: add --set preset= or its sizes")
        return
    for field, value in fields.items():
        path = f"model.config.{field}"
        meaning = meanings[path]
        given = draft.given_fields.keys() & {path, f"{path}._target_"}
        if value is not None and not given and meaning.apply is not None:
            meaning.apply(draft, value)


@cache
def _classes() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(_CLASSES.read_text(encoding="utf-8"))
    return found


def _class_fields(name: str) -> dict[str, Any] | None:
    own = _classes().get(name)
    if own is None:
        return None
    base = _class_fields(own["like"]) if "like" in own else None
    return {**(base or {}), **{field: value for field, value in own.items() if field != "like"}}


def place_tokenizer(draft: Draft) -> None:
    """Set the vocabulary size from the tokenizer if the recipe does not set it (gpt/model/base.py)."""
    facts = draft.facts
    if "model.vocab_size" in draft.values:
        return
    named, pretrains = facts.get("tokenizer"), str(facts.get("verb", "")).endswith("pretrain")
    if type(facts.get("null_entries")) is int:
        place_vocabulary(draft, facts["null_entries"] + 1, "that of a NullTokenizer, which adds an end token")
    elif named is not None or pretrains:
        entries = entries_of(named or DEFAULT)
        if entries is not None:
            default = f"{DEFAULT}, the default of NeMo's data modules"
            place_vocabulary(draft, entries, f"that of {named or default}")
    elif type(facts.get("entries")) is int:
        place_vocabulary(draft, facts["entries"], "that of the model's own tokenizer")
