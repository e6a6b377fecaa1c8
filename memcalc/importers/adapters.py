"""LoRA and QLoRA in PEFT's fields: whether a run trains adapters, and on which layers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import get_args

from memcalc.frameworks.draft import Draft
from memcalc.frameworks.switches import is_on
from memcalc.frameworks.weights import placed_config
from memcalc.spec.finetuning import LATENT_TARGETS, LINEAR_ATTENTION_TARGETS, MAMBA_TARGETS, Target

# What families of transformers call the layers that the table of parameters has (modeling_<family>.py); c_proj and
# dense end more than one layer, and PEFT takes them all.
LAYERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("c_attn", "query_key_value", "Wqkv"), ("qkv_proj",)),
    **dict.fromkeys(("out_proj", "dense"), ("o_proj",)),
    **dict.fromkeys(("c_fc", "fc_in", "fc1", "dense_h_to_4h"), ("up_proj",)),
    **dict.fromkeys(("fc_out", "fc2", "dense_4h_to_h"), ("down_proj",)),
    "c_proj": ("o_proj", "down_proj"),
}

# PEFT 0.17, utils/constants.py: the layers where a program names none, by how our presets' names begin; others have
# the projections of queries and values.
_PEFTS = {
    ("starcoder2", "phi-3.5"): ("q_proj", "v_proj"),
    ("gpt2", "pythia", "gpt-neox", "bloom", "falcon", "mpt", "starcoder", "codegen", "phi-3"): ("qkv_proj",),
    ("phi-1", "phi-2"): ("q_proj", "v_proj", "up_proj", "down_proj"),
}
# The same by model_type.
_PEFTS_OF = {
    ("gpt2", "gpt_neox", "bloom", "falcon", "mpt", "gpt_bigcode", "codegen", "phi3"): ("qkv_proj",),
    ("phi",): ("q_proj", "v_proj", "up_proj", "down_proj"),
    ("nemotron_h",): ("q_proj", "k_proj", "v_proj", "o_proj"),
}

# Names of layers that only some families have, and how their model_type begins.
_OF_FAMILIES = {
    LINEAR_ATTENTION_TARGETS: ("qwen3_5", "qwen3_next"),
    (*MAMBA_TARGETS, *LATENT_TARGETS): ("nemotron_h",),
}

# How PEFT's patterns end: "...(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"
_PATTERN = re.compile(r"\((\w+(?:\|\w+)*)\)(\w*)\$?$")


def place_adapters(draft: Draft) -> None:
    """Set the type of fine-tuning, and the layers with adapters."""
    facts = draft.facts
    adapted = is_on(facts.get("peft")) or draft.values.get("training.finetune") in ("lora", "qlora")
    if adapted and is_on(facts.get("four_bits")):
        draft.values["training.finetune"] = "qlora"
    elif adapted:
        draft.default("training.finetune", "lora")
    else:
        for path in [path for path in draft.values if path.startswith("training.lora.")]:
            del draft.values[path]
        return
    targets = facts.get("targets")
    if isinstance(targets, str):
        targets = _named(draft, targets)
    if isinstance(targets, list):
        targets = _layers(draft, map(str, targets))
    if targets is None and facts.get("pefts_layers") is True:
        targets = _pefts(str(draft.values.get("preset", "")), str(placed_config(draft).get("model_type", "")))
        draft.notes.append(f"adapters on {' and '.join(targets)} (PEFT's default)")
    if targets:
        draft.default("training.lora.target_modules", targets)


def _pefts(preset: str, model_type: str) -> list[str]:
    if model_type:
        return list(next((layers for types, layers in _PEFTS_OF.items() if model_type in types), ("q_proj", "v_proj")))
    return list(next((layers for names, layers in _PEFTS.items() if preset.startswith(names)), ("q_proj", "v_proj")))


def _named(draft: Draft, text: str) -> str | list[str]:
    """Return the modules that a string names: all, several separated by commas, or those that a pattern matches."""
    if text in ("all", "all-linear"):
        return "all-linear"
    ends = _PATTERN.search(text)
    if ends is None:
        return [name.strip() for name in text.split(",")]
    draft.notes.append(f"adapters on the layers of the language model that match {text}")
    return [f"{name}{ends[2] or ''}" for name in ends[1].split("|")]


def _layers(draft: Draft, names: Iterable[str]) -> list[str]:
    """Return memcalc's names of layers; "self_attn.q_proj" is the q_proj of every layer. A note lists unknown names."""
    found: dict[str, None] = {}
    model_type = str(placed_config(draft).get("model_type", ""))
    for name in names:
        last = name.rpartition(".")[2]
        families = next((families for targets, families in _OF_FAMILIES.items() if last in targets), ("",))
        if not model_type.startswith(families):  # PEFT ignores names without a match if others match
            draft.notes.append(f"adapters on {name} are ignored: no layer of the model has this name")
            continue
        ours = LAYERS.get(last, (last,) if last in get_args(Target) else ())
        if not ours:
            draft.notes.append(f"adapters on {name} are ignored: no layer of the model has this name")
        found.update(dict.fromkeys(ours))
    return list(found)
