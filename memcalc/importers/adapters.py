"""LoRA and QLoRA in PEFT's fields: whether a run trains adapters, and on which layers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import get_args

from memcalc.frameworks.draft import Draft, is_on
from memcalc.frameworks.weights import placed_config
from memcalc.spec.finetuning import Target
from memcalc.spec.model_families.conversion import known_families

# What families of transformers call the layers that the table of parameters has (modeling_<family>.py); c_proj and
# dense end more than one layer, and PEFT takes them all.
LAYERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("c_attn", "query_key_value", "Wqkv"), ("qkv_proj",)),
    **dict.fromkeys(("out_proj", "dense"), ("o_proj",)),
    **dict.fromkeys(("c_fc", "fc_in", "fc1", "dense_h_to_4h"), ("up_proj",)),
    **dict.fromkeys(("fc_out", "fc2", "dense_4h_to_h"), ("down_proj",)),
    "c_proj": ("o_proj", "down_proj"),
    "kv_a_proj_with_mqa": ("kv_a_proj",),
    "embed_out": ("lm_head",),
}
_WITH_OUT_PROJ = ("qwen3_5", "qwen3_next")  # families in which out_proj is a layer of linear attention

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

_NAMES = re.compile(r"[\w.,\s-]*")  # names separated by commas, not a pattern
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
    if ends is None and not _NAMES.fullmatch(text):
        draft.limit(
            "adapters on layers that match a pattern", "those of all linear layers are counted", holds_memory=True
        )
        return "all-linear"
    if ends is None:
        return [name.strip() for name in text.split(",")]
    draft.notes.append(f"adapters on the layers of the language model that match {text}")
    return [f"{name}{ends[2] or ''}" for name in ends[1].split("|")]


def _layers(draft: Draft, names: Iterable[str]) -> list[str]:
    """Return memcalc's names of layers; "self_attn.q_proj" is the q_proj of every layer.

    A model without formulas has its own names. A name that memcalc does not know is a limit: the layer may exist. If it
    knows none of them, the spec's rules reject them.
    """
    found: dict[str, None] = {}
    unknown: list[str] = []
    config = placed_config(draft)
    text = config.get("text_config")
    model_type = str((text if isinstance(text, dict) else config).get("model_type", ""))
    written = not model_type or model_type in known_families()
    for name in names:
        last = name.rpartition(".")[2]
        ours = last in get_args(Target) and (last != "out_proj" or model_type.startswith(_WITH_OUT_PROJ))
        if ours or not written:
            found[last] = None
        elif last in LAYERS:
            found.update(dict.fromkeys(LAYERS[last]))
        else:
            unknown.append(last)
    if not found:
        return unknown
    for name in unknown:
        draft.limit(f"adapters on {name}", holds_memory=True)
    return list(found)
