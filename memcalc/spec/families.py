"""Model families: a Hugging Face `config.json` read as our `model:` block, by the families' files of data.

The files are described in memcalc/spec/family_files.py. transformers itself is never imported: sizes are only read.
"""

from __future__ import annotations

import copy
from functools import lru_cache

from memcalc.errors import InputError
from memcalc.extras import installation
from memcalc.spec.family_files import Buffers, Rule, family_named, names
from memcalc.spec.family_reading import check_requirements, value_of
from memcalc.spec.family_values import BOOLEANS, CHOICES, PROBABILITIES, WINDOWS, shown
from memcalc.spec.foreign import can_read_foreign, foreign_block


def read_hf_config(config: dict[str, object], where: str) -> dict[str, object]:
    """The raw `model:` block that a config.json stands for, `architecture` included.

    Fields that the family fixes are left out: `family_defaults` gives them wherever `architecture` is set. Of a family
    (or a variant of one) without formulas it is the sizes and the file itself, if transformers is there to read it.

    Args:
        config: the parsed config.json.
        where: what to call it in errors, e.g. its path.

    Raises:
        InputError: when nobody here knows the model_type, or a key is missing or holds what it cannot hold.
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
            "the key model_type is missing, so the family of the model is unknown.",
            'Add it, e.g. "model_type": "llama".',
            where,
        )
    if not isinstance(model_type, str):
        raise InputError(
            f"model_type = {shown(model_type)} is not a string.", 'Give a name such as "llama".', f"{where}: model_type"
        )
    if model_type not in known_families() and isinstance(config.get("text_config"), dict) and not can_read_foreign():
        raise InputError(
            f"model_type = {shown(model_type)} is a model of several modalities, which memcalc has no formulas for.",
            f"`memcalc trace` runs its step with transformers: {installation('hf')}. To estimate its language "
            "model alone, save the object under text_config as a separate file.",
            f"{where}: model_type",
        )
    if model_type not in known_families():
        return foreign_block(config, where)
    family = family_named(model_type, f"{where}: model_type")
    try:
        check_requirements(family, config, where)
    except InputError:
        if not can_read_foreign():
            raise
        return foreign_block(config, where)
    block: dict[str, object] = {"architecture": model_type}
    for field in family.rules:
        value = value_of(family, field, config, where)
        if value is not None:
            put_at(block, field, value)
    return block


def family_defaults(architecture: str) -> dict[str, object]:
    """The fields that `architecture: X` sets where the `model:` block is silent: everything but sizes.

    Raises:
        InputError: when there is no such family; the message names the nearest ones.
    """
    return copy.deepcopy(_defaults(architecture))


def family_buffers(architecture: str | None) -> Buffers:
    """What a family registers as buffers; without a family, the rotary tables of a whole head."""
    return Buffers() if architecture is None else family_named(architecture, "model.architecture").buffers


def built_in_fp32(architecture: str | None) -> tuple[str, ...]:
    """Modules of a layer whose weights are in fp32 whatever the others are in."""
    return () if architecture is None else family_named(architecture, "model.architecture").in_fp32


def rotated_share(architecture: str) -> float:
    """The part of a head that a family rotates where its config.json does not say."""
    family = family_named(architecture, "model.architecture")
    rule = family.rules.get("rotary_dim", (Rule("value", (), None, {}),))[-1]
    found = next((family.defaults[key] for key in rule.keys if rule.how == "share" and key in family.defaults), 1.0)
    assert isinstance(found, float)
    return found


def family_omissions(architecture: str | None) -> tuple[str, ...]:
    """What a family's block does besides, and the plain implementation does not."""
    return () if architecture is None else family_named(architecture, "model.architecture").not_modelled


def attends_eagerly(architecture: object, implementation: object) -> bool:
    """Whether the modules that run are transformers', of a family that knows no fused attention."""
    if implementation != "huggingface" or architecture not in known_families():
        return False
    return family_named(str(architecture), "model.architecture").eager_only


def family_of(architecture: str) -> str:
    """The model_type that a name stands for: "gpt2" for "gpt3"."""
    return family_named(architecture, "model.architecture").name


def rules_of(family: str) -> dict[str, tuple[Rule, ...]]:
    """How each field of a family is read; of several rules the first that applies."""
    return family_named(family, "model.architecture").rules


def defaults_of(family: str) -> dict[str, object]:
    """What transformers' configuration class takes where config.json leaves a key out."""
    return family_named(family, "model.architecture").defaults


def translations_of(family: str, field: str) -> dict[object, object] | None:
    """Their values of a field and ours; None: they are the same."""
    return family_named(family, "model.architecture").translate.get(field)


def keys_of(architecture: str) -> dict[str, list[str]]:
    """The keys of config.json that decide something of a family, and the fields that each decides."""
    family = family_named(architecture, "model.architecture")
    found: dict[str, list[str]] = {"model_type": ["architecture"]}
    for field, keys in family.read.items():
        for key in keys:
            found.setdefault(key, []).append(field)
    for key in family.require:
        found.setdefault(key, ["architecture"])
    return found


def known_families() -> list[str]:
    """The names that `architecture` and `model_type` may have, sorted."""
    return list(names())


@lru_cache(maxsize=64)
def _defaults(architecture: str) -> dict[str, object]:
    family = family_named(architecture, "model.architecture")
    block: dict[str, object] = copy.deepcopy(family.fixed)
    for field in family.rules:
        # A size of some default checkpoint says nothing about the user's model.
        if field in BOOLEANS or field in PROBABILITIES or field in CHOICES or field in WINDOWS:
            value = value_of(family, field, {}, architecture)
            if value is not None:
                put_at(block, field, value)
    return block


def put_at(block: dict[str, object], field: str, value: object) -> None:
    """Sets "a.b" as b of the object a."""
    outer, _, inner = field.rpartition(".")
    target = block.setdefault(outer, {}) if outer else block
    assert isinstance(target, dict)
    target[inner] = value


def _described(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
