"""torchao's FP8 matmuls, as other frameworks configure them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memcalc.frameworks.draft import Draft
from memcalc.importers.file_format import Meaning, fact

KEY = "training.fp8"

FLAG: Meaning = fact("fp8", KEY)
GATHER: Meaning = fact("fp8_gather", "training.fp8_all_gather")

# All of these also skip layers with sizes that are not multiples of 16.
FIRST_LAYER = "Accelerate does not convert the first linear layer to FP8; it is counted in FP8"

# torchtitan's names of linear layers, and memcalc's.
TORCHTITAN_NAMES = {
    "output": "lm_head",
    "router.gate": "mlp.router",
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "feed_forward": "mlp.",
    "attention": "attention.",
}


def multiply_in_8_bits(
    draft: Draft, recipe: str, *, gathers: bool = False, skip: Sequence[str] | None = None, note: str = ""
) -> None:
    """Set the FP8 recipe if it is modelled; else record that it is not.

    Args:
        draft: the configuration being read, with its adapters and its sharding.
        recipe: a value of `training.fp8`.
        gathers: whether FSDP2 gathers weights in FP8.
        skip: memcalc's names of layers that are not converted; None: the default.
        note: an additional note.
    """
    values = draft.values
    if values.get("training.finetune", "full") != "full":
        draft.limit("torchao's FP8 matmuls with adapters", holds_memory=True)
        return
    draft.default(KEY, recipe)
    if skip is not None:
        draft.default("training.fp8_skip", list(skip))
    sharded = values.get("parallelism.engine") == "fsdp2" and values.get("parallelism.data_parallel", 2) != 1
    if gathers and sharded and recipe == "tensorwise":
        draft.default("training.fp8_all_gather", True)
    if note:
        draft.notes.append(note)


def torchtitan(draft: Draft, named: Any) -> None:
    """Set the FP8 recipe of torchtitan's converters.

    Args:
        draft: the configuration being read.
        named: `model.converters`.
    """
    facts = draft.facts
    converters = named if isinstance(named, list) else [each.strip() for each in str(named).split(",") if each.strip()]
    others = [each for each in converters if not str(each).endswith("float8") or "grouped_mm" in str(each)]
    if others:
        draft.limit(f"model.converters {', '.join(map(str, others))}", holds_memory=True)
    if len(others) == len(converters):
        return
    recipe = str(facts.get("fp8_recipe") or "tensorwise").replace("_with_gw_hp", "-gw-hp")
    if recipe == "tensorwise" and "float8" in converters and draft.values.get("parallelism.tensor_parallel", 1) != 1:
        # infra/parallelize.py looks for this name. Later releases have renamed the converter, but not there, so they
        # gather activations in 16 bits.
        draft.limit("torchao's FP8 matmuls with activations gathered in FP8, as in torchtitan 0.1", holds_memory=True)
        return
    filtered = facts.get("fp8_filter", [])
    filtered = filtered if isinstance(filtered, list) else [filtered]
    skip = []
    for each in map(str, filtered):
        end = each.rpartition(".")[2]
        ours = TORCHTITAN_NAMES.get(each) or TORCHTITAN_NAMES.get(end)
        if ours is None:
            # An unconverted layer needs no casts, but twice the bytes in the all-gather if others are gathered in FP8.
            gathered = facts.get("fp8_gather") is True
            draft.limit(f"filter_fqns {each}", "these layers are counted in FP8", holds_memory=gathered)
        else:
            skip.append(ours)
    multiply_in_8_bits(draft, recipe, gathers=facts.get("fp8_gather") is True, skip=skip)
