"""Requests of the web page made at random: `request(rng)` gives one, as the page's worker passes it on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from memcalc.page.form import choices
from tests.fuzz.command_lines import CONFIGS, GPUS, HOSTILE, OVERRIDES
from tests.fuzz.damage import damaged
from tests.fuzz.formats import FORMATS

# Files that people may paste into the form; the others are no configurations.
PASTED = [name for name in FORMATS if name.endswith(("config", " file"))] + ["chain", "suite", "events"]
_VALUES = {field["path"]: field["values"] for block in choices()["blocks"] for field in block["fields"]}
PATHS = list(_VALUES)
# Values of JSON of which the form sends none, and which a link or a script may hold.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 4, 2**32, 2**63, 10**400, 0.5, 1e308, [], {}, "", [[]], [None], {"": ""}, {"a": {"b": [1]}},
    ["gpt2"], {"model": "gpt2"}, "\ud800", "x" * 50_000, ["x"] * 1_000,
)  # fmt: skip
KINDS = (*("estimate",) * 20, *("diff",) * 8, *("fit",) * 4, "nope", "", "__class__", "\x1b[1m")
MODELS = (*"gpt2 llama-3-8b llama-3.2-1b mixtral-8x7b deepseek-v3 Qwen/Qwen3-0.6B".split() * 8, *CONFIGS, "-")


def request(rng: random.Random) -> str:
    """A request: half of them are what people ask for, the others may be anything."""
    hostile = rng.random() < 0.5
    kind = rng.choice(KINDS if hostile else KINDS[:32])
    asked: dict[str, Any] = {"kind": kind, "run": _run(rng, hostile)}
    if kind == "diff":
        asked["other"] = _run(rng, False)
    if kind == "fit":
        quantities = ("", "micro_batch_size", "sequence_length", *(HOSTILE if hostile else ()))
        asked["run"]["model"] = "gpt2"  # searches over large models are long, show their progress, and can be stopped
        asked["run"].pop("text", None)
        asked |= {"maximize": rng.choice(quantities), "minimize": rng.choice(("", "gpus", *quantities[3:]))}
    if not hostile:
        return json.dumps(asked)
    if rng.random() < 0.3:
        _change(rng, asked)
    text = json.dumps(asked)
    return damaged(rng, text.encode()).decode(errors="surrogateescape") if rng.random() < 0.15 else text


def _run(rng: random.Random, hostile: bool) -> dict[str, Any]:
    run: dict[str, Any] = {
        "model": rng.choice(MODELS if hostile else MODELS[:6]),
        "gpu": rng.choice(("", "l4", "h200")),
    }
    if rng.random() < 0.3:
        content = FORMATS[rng.choice(PASTED)].content
        run["text"] = (damaged(rng, content) if hostile else content).decode(errors="surrogateescape")
    if rng.random() < 0.5:
        paths = rng.sample(PATHS, rng.choice((1, 1, 2, 4)) if hostile else 1)
        run["fields"] = {path: rng.choice(_VALUES[path] or ("2", "8")) for path in paths}
    if not hostile:
        return run
    if rng.random() < 0.2:
        run["gpu"] = rng.choice((*GPUS, *HOSTILE))
    if rng.random() < 0.3:
        run["gpus"] = rng.choice(
            ("1", "8", "64", "64", "0", "1000003", "9" * 30, "\uff18", "\u00b2", rng.choice(HOSTILE))
        )
    if rng.random() < 0.4:
        run["more"] = "\n".join(rng.choices((*OVERRIDES * 3, *HOSTILE), k=rng.choice((1, 1, 3))))
    if rng.random() < 0.1:
        run.setdefault("fields", {})[rng.choice((*PATHS, *HOSTILE))] = rng.choice(HOSTILE)
    return run


def _change(rng: random.Random, asked: dict[str, Any]) -> None:
    """One value replaced, removed or added, in place."""
    *outer, last = rng.choice(list(_places(asked)))
    block = asked
    for key in outer:
        block = block[key]
    kind = rng.random()
    if kind < 0.6:
        block[last] = rng.choice(VALUES)
    elif kind < 0.8:
        del block[last]
    else:
        block[rng.choice((*HOSTILE, "kind", "model", "text", "fields", "other"))] = rng.choice(VALUES)


def _places(block: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in block.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from _places(value, (*before, key))
