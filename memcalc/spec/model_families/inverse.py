"""Conversion of a `model:` block to the config.json of its family: the families' data read backwards.

The result is read forwards again and must give the same block. A block that a family cannot express is therefore
rejected, regardless of how the result was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from memcalc.errors import InputError
from memcalc.spec.derive import derive_model
from memcalc.spec.model import ModelSpec
from memcalc.spec.model_families.conversion import put_at, read_hf_config
from memcalc.spec.model_families.files import FamilyFile, FieldRule, family_named

_UNSETTLED = object()
_UNSAID = object()  # no key is needed


def write_hf_config(model: ModelSpec) -> dict[str, Any]:
    """Return the keys of a config.json that give this block, including `model_type`.

    Raises:
        InputError: there is no architecture, or the family has no such variant; the message has the first field.
    """
    if model.architecture is None:
        raise InputError(
            "model.architecture is missing, so the class of transformers is unknown.",
            "Set model.architecture, or implementation: plain.",
            "model.architecture",
        )
    family = family_named(model.architecture)
    wanted = _flat(model)
    differing: list[str] = []
    for config in _candidates(family, wanted):
        found = _read(family.name, config)
        differing = sorted(field for field in wanted if found is None or found.get(field) != wanted[field])
        if found is not None and not differing:
            return config
    if not differing:
        raise InputError(
            f"transformers' {family.name} has no such combination of sizes.",
            "Compare with a preset of this family, or set implementation: plain.",
            "model",
        )
    field = differing[0]
    raise InputError(
        f"{field} = {wanted.get(field)!r} is not a value that transformers' {family.name} has with these sizes.",
        f"Leave {field} out, or set implementation: plain.",
        f"model.{field}",
    )


def _flat(model: ModelSpec) -> dict[str, Any]:
    """Return every field except the architecture, by its dotted path."""
    found: dict[str, Any] = {}
    for name, value in model.model_dump().items():
        if isinstance(value, dict):
            found.update({f"{name}.{inner}": each for inner, each in value.items()})
        elif name not in ("architecture", "vision_config"):
            found[name] = model.mixers if name == "layer_pattern" else value
    return found


def _read(family: str, config: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return _flat(ModelSpec.model_validate(derive_model(read_hf_config(config, family))))
    except InputError:
        return None


def _candidates(family: FamilyFile, wanted: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield configs that may give the wanted fields: one for each combination of the rules' cases."""
    fields = [field for field in family.rules if field in wanted]
    for positions in product(*(range(len(family.rules[field])) for field in fields)):
        keys: dict[str, Any] = {}
        chosen = [family.rules[field][position] for field, position in zip(fields, positions, strict=True)]
        for field, position in zip(fields, positions, strict=True):
            for passed in family.rules[field][:position]:  # earlier cases must not apply
                if len(passed.when) == 1:
                    keys.update((key, not value) for key, value in passed.when.items() if isinstance(value, bool))
        # Rules of one key come first, because rules of several keys depend on them.
        order = sorted(zip(fields, chosen, strict=True), key=lambda pair: pair[1].how not in ("read", "value"))
        if all(_settle(keys, field, rule, wanted, family) for field, rule in order):
            config: dict[str, Any] = {"model_type": family.name, **family.needed_keys}
            for key, value in keys.items():
                # Defaults are omitted: the classes distinguish 0 from 0.0, and null from an absent key.
                if value != family.defaults.get(key) or type(value) is bool:
                    put_at(config, key, value)
            yield config


def _settle(keys: dict[str, Any], field: str, rule: FieldRule, wanted: dict[str, Any], family: FamilyFile) -> bool:
    """Add the keys that a rule needs to give the wanted value; False: impossible, or in conflict with another field."""
    needs = dict(rule.when)
    value = wanted[field]
    if not _can_give(field, rule, value):
        return False
    if rule.how == "read":
        theirs = _theirs(field, wanted, family)
        if theirs is _UNSETTLED:
            return False
        needs[rule.keys[0]] = theirs
    elif rule.how == "product":
        unit = keys.get(rule.keys[1])
        needs[rule.keys[0]] = value // unit if unit else 0
    elif rule.how == "share":
        head = wanted["head_dim"]
        share = value / head
        needs[rule.keys[-1]] = share if int(head * share) == value else (value + 0.5) / head
    elif rule.how == "pattern":
        needs[rule.keys[-1]] = value  # the last key has letters
    elif rule.how in ("except", "every", "others", "before", "after"):
        given = _of_layers(field, rule.how, wanted)
        if given is _UNSETTLED:
            return False
        if given is not _UNSAID:
            needs[rule.keys[0]] = given
    return all(keys.setdefault(key, needed) == needed for key, needed in needs.items())


def _can_give(field: str, rule: FieldRule, value: Any) -> bool:
    """Return whether a rule can give a value, whatever the other fields are."""
    if rule.how == "value":
        return bool(rule.value == (list(value) if isinstance(value, tuple) else value))
    if rule.how == "read" and field == "full_attention_interval":
        return bool(value)  # the classes divide by it
    if rule.how == "read" and field == "sliding_window" and rule.when:
        return bool(value)  # a window that is used without a length gets the default one of the class
    return rule.how != "in_full_layers"  # other keys have the same meaning


def _of_layers(field: str, how: str, wanted: dict[str, Any]) -> Any:
    """Return the value of a per-layer key that gives the wanted layers."""
    value = wanted[field]
    if how == "every":
        found = _layer_types(field, wanted)
        # Window layers without a window length: the class would set its own length.
        return _UNSETTLED if "sliding_attention" in found and not wanted["sliding_window"] else found
    if how == "others":
        return _layer_types(field, wanted) if value else _UNSAID
    if how == "before":
        return len(value) if list(value) == list(range(len(value))) else _UNSETTLED
    if not value:
        return None
    if how == "after":
        return min(value) - 1
    return [layer for layer in range(wanted["num_layers"]) if layer not in value]


def _layer_types(field: str, wanted: dict[str, Any]) -> list[Any]:
    """Return one entry per layer: "full_attention" or "sliding_attention"; for rotation, 0 or 1."""
    of = field.rpartition("_")[0]
    interval, layers = wanted[f"{of}_interval"], wanted[f"{of}_layers"]
    whole = [bool(interval and (layer + 1) % interval == 0) or layer in layers for layer in range(wanted["num_layers"])]
    if of == "unrotated":
        return [int(not each) for each in whole]
    other = "linear_attention" if "linear_attention.num_key_heads" in wanted else "sliding_attention"
    return ["full_attention" if each else other for each in whole]


def _theirs(field: str, wanted: dict[str, Any], family: FamilyFile) -> Any:
    """Return the family's name of memcalc's value: the first that also fits all fields read by the same rules."""
    value, table = wanted[field], family.translate.get(field)
    if table is None:
        return list(value) if isinstance(value, tuple) else value
    rules = family.rules
    alike = {other: family.translate.get(other) or {} for other in rules if rules[other] == rules[field]}
    words = (word for word in table if all(words.get(word) == wanted[other] for other, words in alike.items()))
    found = next(words, _UNSETTLED)
    # A table with only null translates null; other values pass unchanged.
    return value if found is _UNSETTLED and None in table else found
