"""Rows of Megatron-Core's embedding: a tokenizer's entries, padded for the tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

from memcalc.frameworks.draft import Draft
from memcalc.importers.models import preset_of

NULL = "NullTokenizer"  # has the given number of entries, and an end
_DIVISIBLE = 128  # arguments.py: make_vocab_size_divisible_by
_ENTRIES = {"GPT2BPETokenizer": 50_257, "Llama2Tokenizer": 32_000}


def entries_of(name: Any) -> int | None:
    """Return the entries of a tokenizer, named by its class or by its model; None if unknown."""
    if not isinstance(name, str):
        return None
    preset = preset_of(name)
    if preset is None:
        return _ENTRIES.get(name)
    from memcalc.spec.loading import load  # few files name one

    return load(preset).model.vocab_size


def place_vocabulary(draft: Draft, entries: Any, source: str) -> None:
    """Set the padded vocabulary, with a note; a value that is not a number is left to the rules of the spec.

    Args:
        draft: the configuration being read; the rows of each rank are a multiple of its fact `divisible`.
        entries: entries of the tokenizer.
        source: the tokenizer, for the note.
    """
    if draft.overridden.keys() & {"model.vocab_size", "preset", "hf_config"}:
        return
    divisible, ranks = draft.facts.get("divisible", _DIVISIBLE), draft.values.get("parallelism.tensor_parallel", 1)
    if not all(type(number) is int and number > 0 for number in (entries, divisible, ranks)):
        draft.values["model.vocab_size"] = entries
        return
    multiple = divisible * ranks
    padded = -(-entries // multiple) * multiple
    draft.values["model.vocab_size"] = padded
    if padded != entries or source:
        draft.notes.append(f"the vocabulary is {source or f'{entries:,}'}, padded to {padded:,}")
