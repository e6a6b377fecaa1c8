"""What the classes that a recipe of NeMo 2 names say of its model, and the vocabulary of its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from memcalc.importers.models import preset_of
from memcalc.importers.table import Draft, Meaning

_CLASSES = Path(__file__).resolve().parent.parent / "data" / "nemo.yaml"
_GPT2 = 50_257  # entries of the tokenizer that data modules take where none is named


def place_class(draft: Draft, meanings: Mapping[str, Meaning]) -> None:
    """What the model's class says of it, under what the file says itself.

    Args:
        draft: our configuration in the making; the class is its fact `class`.
        meanings: of the fields of `model.config`.
    """
    name = str(draft.facts.get("class", "")).rpartition(".")[2]
    if not name:
        return
    fields = _class_fields(name)
    if fields is None:
        draft.notes.append(f"what {name} says of its model is not known here: give it with --set preset= or its sizes")
        return
    for field, value in fields.items():
        path = f"model.config.{field}"
        meaning = meanings[path]
        said = draft.paths & {path, f"{path}._target_"}
        if value is not None and not said and meaning.apply is not None:
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


def place_vocabulary(draft: Draft) -> None:
    """gpt/model/base.py: the tokenizer's entries, padded so that every rank has as many, and these divide."""
    facts, values = draft.facts, draft.values
    if "model.vocab_size" in values or draft.overridden & {"model.vocab_size", "preset", "hf_config"}:
        return
    whose = "the model's tokenizer"
    entries = facts.get("entries")
    named, pretrains = facts.get("tokenizer"), str(facts.get("verb", "")).endswith("pretrain")
    if type(facts.get("null_entries")) is int:
        whose, entries = "the tokenizer", facts["null_entries"] + 1  # null_tokenizer.py: and an end
    elif isinstance(named, str) and (preset := preset_of(named)) is not None:
        from memcalc.spec.loading import load  # few recipes name one

        whose, entries = named, load(preset).model.vocab_size
    elif (named is None and pretrains) or named == "GPT2BPETokenizer":
        whose, entries = "GPT-2's tokenizer, which data has where none is named", _GPT2
    elif isinstance(named, str):
        entries = None
    if type(entries) is not int:
        return
    ranks = values.get("parallelism.tensor_parallel", 1)
    multiple = facts.get("divisible", 128) * ranks if type(facts.get("divisible", 128)) is type(ranks) is int else 1
    values["model.vocab_size"] = -(-entries // max(multiple, 1)) * max(multiple, 1)
    draft.notes.append(f"the vocabulary is that of {whose}, padded to {values['model.vocab_size']:,}")
