"""Reading of one field from a config.json, by the rules of its family."""

from __future__ import annotations

import difflib
import math

from memcalc.errors import InputError
from memcalc.spec.model import ATTENTION, EXPERTS, MAMBA, MLP
from memcalc.spec.model_families.field_types import checked, kind_of, shown
from memcalc.spec.model_families.files import FamilyFile, FieldRule

# An explicit null leaves them unset, because derive.py derives them.
_DERIVED = frozenset({"num_key_value_heads", "head_dim", "intermediate_size", "embedding_size"})

_MOST_NAMED_LAYERS = 2**16
# transformers' types of layers with a single module
LETTERS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
    "moe": EXPERTS,
}
_ABSENT = object()


def value_of(family: FamilyFile, field: str, config: dict[str, object], where: str) -> object:
    """Return memcalc's value of one field, validated; None: leave it unset."""
    rule = next(rule for rule in family.rules[field] if _applies(family, rule, config))
    if rule.how != "read":
        return _computed(family, field, rule, config, where)
    key, value = _found(family, field, rule.keys, config, where)
    table = family.translate.get(field)
    if table is not None and (value is None or None not in table):  # a null entry translates null only
        return _translated(family, key, value, table, where)
    if value is None and field in _DERIVED:
        return None
    return checked(key, value, kind_of(field), where)


def _applies(family: FamilyFile, rule: FieldRule, config: dict[str, object]) -> bool:
    for key, wanted in rule.when.items():
        value = _looked_up(config, key)
        if value is _ABSENT or value is None:
            value = family.defaults.get(key)
        if type(value) is not type(wanted) or value != wanted:
            return False
    return True


def _computed(family: FamilyFile, field: str, rule: FieldRule, config: dict[str, object], where: str) -> object:
    """Return the value of a field that does not equal the value of one key."""
    if rule.how == "value":
        return rule.value
    if rule.how in ("product", "quotient"):
        kind = "count" if rule.how == "product" else "size"
        found = [checked(*_found(family, field, (key,), config, where), kind, where) for key in rule.keys]
        sizes = [size for size in found if isinstance(size, int)]
        return math.prod(sizes) if rule.how == "product" else sizes[0] // sizes[1] or None
    if rule.how == "in_full_layers":
        by_layer, key = rule.keys
        objects = _looked_up(config, by_layer)
        assert isinstance(objects, dict)  # see `check_requirements`
        own = next(iter(objects.values()))
        value = own[key] if key in own else _found(family, field, (key,), config, where)[1]
        return checked(key, value, kind_of(field), where)
    key, value = _found(family, field, rule.keys, config, where)
    if rule.how in ("pattern", "length"):
        letters = _letters(key, value, where)
        return letters if rule.how == "pattern" else len(letters)
    if rule.how == "share":
        if value is None:
            return None
        share = checked(key, value, "share", where)
        head = value_of(family, "head_dim", config, where) if "head_dim" in family.rules else None
        if head is None:
            hidden, heads = (value_of(family, name, config, where) for name in ("hidden_size", "num_attention_heads"))
            assert isinstance(hidden, int) and isinstance(heads, int)  # noqa: PT018 - both are validated sizes
            head = hidden // heads
        assert isinstance(share, float) and isinstance(head, int)  # noqa: PT018 - both are validated sizes
        return int(head * share)
    if rule.how in ("every", "others"):
        interval, layers = _whole_layers(key, value, where)
        return interval if rule.how == "every" else layers
    return _other_layers(family, rule.how, key, value, config, where)


def _other_layers(
    family: FamilyFile, how: str, key: str, value: object, config: dict[str, object], where: str
) -> list[int]:
    """Return the layers that a list does not name, the layers after one, or the first ones."""
    layers = value_of(family, "num_layers", config, where)
    if value is None or value == -1:
        return []
    assert isinstance(layers, int)
    if layers > _MOST_NAMED_LAYERS:
        raise InputError(
            f"the model has {layers} layers, and {key} supports at most {_MOST_NAMED_LAYERS:,}.",
            f"Leave {key} out.",
            f"{where}: {key}",
        )
    if how == "before":
        first = checked(key, value, "count", where)
        assert isinstance(first, int)
        return list(range(min(first, layers)))
    if how == "after":
        last = checked(key, value, "count", where)
        assert isinstance(last, int)
        return list(range(min(last + 1, layers), layers))
    named = checked(key, value, "layers", where)
    assert isinstance(named, list)
    return sorted(set(range(layers)) - set(named))


def _whole_layers(key: str, value: object, where: str) -> tuple[int, list[int]]:
    """Return (n, []) if every n-th layer has full attention (or a 0), else 0 and the list of such layers."""
    if value is None:
        return 0, []
    if (
        not isinstance(value, list)
        or len(value) > _MOST_NAMED_LAYERS
        or not all(isinstance(v, (str, int)) for v in value)
    ):
        raise InputError(
            f"{key} = {shown(value)} is not a list of words.", "Write one word per layer.", f"{where}: {key}"
        )
    full = [layer for layer, word in enumerate(value) if word in ("full_attention", 0)]
    interval = full[0] + 1 if full else 0
    if full == list(range(interval - 1, len(value), interval or 1)) or not full:
        return interval, []
    return 0, full


def _letters(key: str, value: object, where: str) -> str:
    """Return one letter per layer, of a list of layer types or of letters.

    Source: transformers 5.23 models/nemotron_h/configuration_nemotron_h.py, _pattern_to_list; the words "mamba" and
    "attention" are the older names of two types (configuration_utils.py, remap_legacy_layer_types).
    """
    if isinstance(value, (list, str)) and 0 < len(value) <= _MOST_NAMED_LAYERS:
        found = [word if word in LETTERS.values() else LETTERS.get(word) for word in value if isinstance(word, str)]
        if len(found) == len(value) and None not in found:
            return "".join(str(letter) for letter in found)
    raise InputError(
        f"{key} = {shown(value)} does not give each layer one of the types that memcalc models.",
        f"They are {', '.join(dict.fromkeys(LETTERS))}, or the letters {' '.join(dict.fromkeys(LETTERS.values()))}.",
        f"{where}: {key}",
    )


def _looked_up(config: dict[str, object], key: str) -> object:
    """Return the value of a key, "a.b" being b of the object a."""
    value: object = config
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _found(
    family: FamilyFile, field: str, keys: tuple[str, ...], config: dict[str, object], where: str
) -> tuple[str, object]:
    """Return the key that counts and its value, or transformers' default."""
    present = [key for key in keys if _looked_up(config, key) is not _ABSENT]
    key = next((key for key in present if _looked_up(config, key) is not None), present[0] if present else keys[0])
    value = _looked_up(config, key)
    table = family.translate.get(field, {})
    if value is None and field not in _DERIVED and None not in table:
        value = _ABSENT  # transformers' classes also treat null as absent
    if value is _ABSENT:
        value = next((family.defaults[name] for name in keys if name in family.defaults), _ABSENT)
    if value is _ABSENT:
        like = difflib.get_close_matches(keys[0], config, n=1, cutoff=0.9)
        raise InputError(
            f"the key {' or '.join(keys)} is missing, and a {family.name} model has no default for it.",
            f"Rename {shown(like[0])} to {keys[0]}."
            if like
            else "Pass the model's complete config.json, or add the key.",
            where,
        )
    return key, value


def _translated(family: FamilyFile, key: str, value: object, table: dict[object, object], where: str) -> object:
    # A list or an object in place of a name is unhashable, and 1 would match an entry for true.
    for theirs, ours in table.items():
        if type(theirs) is type(value) and theirs == value:
            return ours
    known = ", ".join(str(theirs) for theirs in table)
    raise InputError(
        f"{shown(value)} is not a value that memcalc models for {family.name}.",
        f"Choose from {known}.",
        f"{where}: {key}",
    )


def check_requirements(family: FamilyFile, config: dict[str, object], where: str) -> None:
    """Check that memcalc models this variant of the family.

    Raises:
        InputError: it does not.
    """
    for key, allowed in family.require.items():
        value = _looked_up(config, key)
        value = family.defaults.get(key, allowed[0]) if value is _ABSENT else value
        # 1 == True and 1.0 == 1 in Python, but not in a config.
        if not any(value == other and type(value) is type(other) for other in allowed):
            raise InputError(
                f"{shown(value)} is a variant of {family.name} that memcalc does not model.",
                f"Set {key}: {shown(allowed[0])}, the only modelled value.",
                f"{where}: {key}",
            )
    for key, types in family.full_layers.items():
        _check_full_layers(family, config, key, types, where)
    for key, word in family.last.items():
        value = _looked_up(config, key)
        if not isinstance(value, list) or value[-1:] != [word]:
            raise InputError(
                f"{shown(None if value is _ABSENT else value)} describes a variant of {family.name} that memcalc does "
                "not model.",
                f"It models a list that ends with {shown(word)}.",
                f"{where}: {key}",
            )


def _check_full_layers(family: FamilyFile, config: dict[str, object], key: str, types: str, where: str) -> None:
    """Check that the layers with full attention, and no others, have other values, which are equal."""
    objects, words = _looked_up(config, key), _looked_up(config, types)
    if objects is _ABSENT or objects is None:
        return
    words = words if isinstance(words, list) else []
    full = {str(layer) for layer, word in enumerate(words) if word == "full_attention"}
    if isinstance(objects, dict) and {str(layer) for layer in objects} == full:
        first, *others = objects.values()
        if isinstance(first, dict) and all(own == first for own in others):
            return
    raise InputError(
        f"{shown(objects)} describes a variant of {family.name} that memcalc does not model.",
        f"It models the same other values in the layers with full_attention under {types}, and no others.",
        f"{where}: {key}",
    )
