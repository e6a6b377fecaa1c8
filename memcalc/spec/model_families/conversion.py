"""Model families: conversion of a Hugging Face `config.json` to a `model:` block, by the families' data files.

memcalc/spec/model_families/files.py describes the files. transformers itself is not imported: only sizes are read.
"""

from __future__ import annotations

import copy
from functools import lru_cache

from memcalc.errors import InputError
from memcalc.extras import installation
from memcalc.spec.model_families.field_reading import check_requirements, value_of
from memcalc.spec.model_families.field_types import BOOLEANS, CHOICES, PROBABILITIES, WINDOWS, shown
from memcalc.spec.model_families.files import FamilyBuffers, FieldRule, family_named, names
from memcalc.spec.model_families.transformers_fallback import can_read_with_transformers, fallback_block


def read_hf_config(config: dict[str, object], where: str) -> dict[str, object]:
    """Return the raw `model:` block of a config.json, including `architecture`.

    Fields that the family determines are omitted: `family_defaults` provides them for `architecture`. For a family
    without formulas, or a variant of one, the block is the sizes and the file itself, if transformers is installed to
    read it.

    Args:
        config: the parsed config.json.
        where: its name in errors, e.g. its path.

    Raises:
        InputError: the model_type is unknown, or a key is missing or has an invalid value.
    """
    if not isinstance(config, dict):
        raise InputError(
            f"the file holds {_described(config)}, not a JSON object.",
            "Give the config.json of a Hugging Face model.",
            where,
        )
    model_type = config.get("model_type")
    if model_type is None:
        raise InputError(
            "model_type is missing, so the family of the model is unknown.",
            'Add the key, e.g. "model_type": "llama".',
            where,
        )
    if not isinstance(model_type, str):
        raise InputError(
            f"model_type = {shown(model_type)} is not a string.", 'Give a name such as "llama".', f"{where}: model_type"
        )
    if (
        model_type not in known_families()
        and isinstance(config.get("text_config"), dict)
        and not can_read_with_transformers()
    ):
        raise InputError(
            f"model_type = {shown(model_type)} is a multimodal model without formulas in memcalc.",
            f"`memcalc trace` runs its step with transformers: {installation('hf')}. To estimate its language "
            "model alone, save the object under text_config as a separate file.",
            f"{where}: model_type",
        )
    if model_type not in known_families():
        return fallback_block(config, where)
    family = family_named(model_type, f"{where}: model_type")
    try:
        check_requirements(family, config, where)
    except InputError:
        if not can_read_with_transformers():
            raise
        return fallback_block(config, where)
    block: dict[str, object] = {"architecture": model_type}
    for field in family.rules:
        value = value_of(family, field, config, where)
        if value is not None:
            put_at(block, field, value)
    return block


def has_family_formulas(config: dict[str, object]) -> bool:
    """Return whether a config.json is of a family with formulas, and of a variant that they cover."""
    model_type = config.get("model_type")
    if model_type not in known_families():
        return False
    try:
        check_requirements(family_named(str(model_type), "model_type"), config, "model")
    except InputError:
        return False
    return True


def family_defaults(architecture: str) -> dict[str, object]:
    """Return the defaults that `architecture: X` sets in the `model:` block: all fields except sizes.

    Raises:
        InputError: the family is unknown; the message suggests the nearest names.
    """
    return copy.deepcopy(_defaults(architecture))


def family_buffers(architecture: str | None) -> FamilyBuffers:
    """Return the buffers of a family; without a family, the RoPE cos/sin cache of a full head."""
    return FamilyBuffers() if architecture is None else family_named(architecture).buffers


def built_in_fp32(architecture: str | None) -> tuple[str, ...]:
    """Return the modules of a layer with fp32 weights, regardless of the dtype of the others."""
    return () if architecture is None else family_named(architecture).in_fp32


def rotary_fraction(architecture: str) -> float:
    """Return the rotated fraction of a head if a family's config.json omits it."""
    family = family_named(architecture)
    rule = family.rules.get("rotary_dim", (FieldRule("value", (), None, {}),))[-1]
    found = next((family.defaults[key] for key in rule.keys if rule.how == "share" and key in family.defaults), 1.0)
    assert isinstance(found, float)
    return found


def attends_eagerly(architecture: object, implementation: object) -> bool:
    """Return whether the run uses transformers' modules of a family that rejects `sdpa`: eager is their default."""
    if implementation != "huggingface" or architecture not in known_families():
        return False
    return family_named(str(architecture)).eager_only


def fused_attention(architecture: object) -> str:
    """Return the fused kernel that scaled_dot_product_attention takes for what a family's modules pass to it."""
    if architecture not in known_families():
        return "flash"
    return family_named(str(architecture)).fused_attention


def family_of(architecture: str) -> str:
    """Return the model_type of a name: "gpt2" for "gpt3"."""
    return family_named(architecture).name


def rules_of(family: str) -> dict[str, tuple[FieldRule, ...]]:
    """Return the rules for reading each field of a family; the first applicable rule counts."""
    return family_named(family).rules


def keys_of(architecture: str) -> dict[str, list[str]]:
    """Return the keys of config.json that affect a family's block, with the fields that each key affects."""
    family = family_named(architecture)
    found: dict[str, list[str]] = {"model_type": ["architecture"]}
    for field, keys in family.read.items():
        for key in keys:
            found.setdefault(key, []).append(field)
    for key in family.require:
        found.setdefault(key, ["architecture"])
    return found


def known_families() -> list[str]:
    """Return the valid values of `architecture` and `model_type`, sorted."""
    return list(names())


@lru_cache(maxsize=64)
def _defaults(architecture: str) -> dict[str, object]:
    family = family_named(architecture)
    block: dict[str, object] = copy.deepcopy(family.fixed)
    for field in family.rules:
        # The size of a default checkpoint is not that of the user's model.
        if field in BOOLEANS or field in PROBABILITIES or field in CHOICES or field in WINDOWS:
            value = value_of(family, field, {}, architecture)
            if value is not None:
                put_at(block, field, value)
    return block


def put_at(block: dict[str, object], field: str, value: object) -> None:
    """Set "a.b" as b of the object a."""
    outer, _, inner = field.rpartition(".")
    target = block.setdefault(outer, {}) if outer else block
    assert isinstance(target, dict)
    target[inner] = value


def _described(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
