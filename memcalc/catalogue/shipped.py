"""Published models by their Hugging Face hub id, from the catalogue that memcalc ships: no network, no transformers.

`memcalc/data/models.jsonl` has one JSON object per line. The first holds the sources and the checks; each other line
is one configuration with the hub ids that were published with it:

    ids         hub id: [index of its source, index of its check], counted from 0
    parameters  of the model that transformers builds from `config` on the meta device, tied weights counted once
    kind        causal-lm, vision-language, encoder, encoder-decoder, state-space or hybrid
    hub_type    only for a model that ships its own code: its model_type on the hub; the class of `config` has the
                same layers
    config      the keys of config.json that decide memory; an absent key has the default of the class

`tools/catalogue.py` checks the file against transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parent.parent / "data" / "models.jsonl"
UNVERIFIED = "not verified: "  # prefix of the check of an unverified id


class CatalogueEntry(NamedTuple):
    """One published model."""

    hub_id: str  # the id as spelled on the hub, e.g. "meta-llama/Llama-3.1-8B".
    config: dict[str, Any]  # the keys of its config.json that decide memory
    parameters: int  # elements of the model that transformers builds from `config`, tied weights counted once
    model_class: str  # causal-lm, vision-language, encoder, encoder-decoder, state-space or hybrid
    source: str  # where the figures were published
    check: str  # what the parameter count was compared with
    # the model_type on the hub of a model that ships its own code; None: transformers has its class
    hub_type: str | None

    @property
    def verified(self) -> bool:
        """Whether the parameter count agrees with a published one."""
        return not self.check.startswith(UNVERIFIED)


def find_shipped(hub_id: str) -> CatalogueEntry | None:
    """Return the catalogue's model of this id, else of an id that differs only in case; None: there is neither.

    Only the line of the model is parsed.
    """
    data = _data()
    key = json.dumps(hub_id, ensure_ascii=False).encode("utf-8", "replace") + b": ["
    position = data.find(key)
    if position < 0:
        position = data.lower().find(key.lower())
    if position < 0:
        return None
    name = json.JSONDecoder().raw_decode(data[position : position + len(key)].decode())[0]
    line = data[data.rfind(b"\n", 0, position) + 1 : data.find(b"\n", position)]
    return _entry(json.loads(line), name)


def shipped_entries() -> Iterator[CatalogueEntry]:
    """Yield all models of the catalogue in file order; ids of one configuration are adjacent."""
    for line in _data().splitlines()[1:]:
        raw = json.loads(line)
        for hub_id in raw["ids"]:
            yield _entry(raw, hub_id)


def shipped_ids() -> list[str]:
    """Return all hub ids of the catalogue, sorted case-insensitively."""
    return sorted((entry.hub_id for entry in shipped_entries()), key=str.lower)


def search_shipped(query: str) -> list[CatalogueEntry]:
    """Return the models with every word of `query` in their id, shortest id first; case and punctuation are ignored."""
    words = re.findall(r"[a-z0-9.]+", query.lower())
    found = [entry for entry in shipped_entries() if words and all(word in entry.hub_id.lower() for word in words)]
    return sorted(found, key=lambda entry: (len(entry.hub_id), entry.hub_id.lower()))


def _entry(raw: dict[str, Any], hub_id: str) -> CatalogueEntry:
    head = _head()
    source, check = raw["ids"][hub_id]
    return CatalogueEntry(
        hub_id,
        raw["config"],
        raw["parameters"],
        raw["kind"],
        head["sources"][source],
        head["checks"][check],
        raw.get("hub_type"),
    )


@cache
def _data() -> bytes:
    return FILE.read_bytes()


@cache
def _head() -> dict[str, list[str]]:
    head: dict[str, list[str]] = json.loads(_data()[: _data().index(b"\n")])
    return head
