"""Model families: how a Hugging Face `config.json` becomes our `model:` block, as data.

One file a model_type in memcalc/data/families, with these keys:

    same_as    another family that this name stands for; nothing else is given then
    source     the code that the file was read from
    fixed      our fields that the family's code settles whatever the config says
    read       our field: their key ("a.b" lies in the object a), or a list of keys of which the first that is present
               counts, or one of the mappings below; `moe` and `mla` are nested
    defaults   their key: what transformers' configuration class takes where config.json leaves it out
    translate  our field: {their value: our value}; a value outside the table is refused
    require    their key: the values (the first one is the default) for which our block holds at all
    buffers    what transformers registers as buffers; see `Buffers`
    not_modelled   what the family's block does besides, and the plain implementation does not

Where one key is not the whole story, a field reads

    {product: [keys]}, {quotient: [two keys]}      of sizes; the quotient is rounded down
    {share: keys}                                  of the width of a head
    {except: key}, {after: key}                    the layers that a list leaves out; those behind a layer, -1 the last
    {value: ours}                                  the same for every config
    {cases: [{when: {key: value, ...}, ...}, ...]} the first of these for which the config says so; the last has no when

transformers itself is never imported: sizes are only read.
"""

from __future__ import annotations

import copy
import difflib
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from memcalc.errors import InputError

FOLDER = Path(__file__).parent.parent / "data" / "families"

# CSafeLoader is some ten times faster, but is absent where PyYAML was built without libyaml.
_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# What a value must be; all other fields are sizes: whole numbers from 1 on. Choices come out of `translate`.
BOOLEANS = frozenset(
    {
        "norm_weight",
        "norm_bias",
        "final_norm",
        "embedding_norm",
        "qkv_bias",
        "output_bias",
        "mlp_bias",
        "lm_head_bias",
        "attention_sinks",
        "qk_norm",
        "qk_norm_weight",
        "tie_word_embeddings",
        "parallel_block",
        "fused_qkv",
        "fused_gate_up",
        "moe.shared_expert_gate",
        "moe.expert_bias",
        "moe.router_bias",
        "moe.router_correction_bias",
        "moe.router_correction_parameter",
    }
)
PROBABILITIES = frozenset({"attention_dropout", "residual_dropout", "embedding_dropout"})
COUNTS = frozenset(
    {
        "position_embedding_offset",
        "moe.shared_expert_intermediate_size",
        "moe.first_dense_layers",
        "mla.q_lora_rank",
    }
)
CHOICES = frozenset(
    {
        "architecture",
        "position_embedding",
        "normalization",
        "norms_per_layer",
        "norm_placement",
        "qk_norm_width",
        "mlp",
    }
)
LAYERS = frozenset({"moe.dense_layers"})

# Left unset by an explicit null, because derive.py knows what they follow from.
_DERIVED = frozenset({"num_key_value_heads", "head_dim", "intermediate_size", "embedding_size"})

_LARGEST_SIZE = 2**40
_MOST_NAMED_LAYERS = 2**16
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Buffers:
    """Buffers that transformers registers for a family, beside what ModelSpec tells.

    Args:
        rotary_fraction: share of a head that is rotated; two tables of half its width hold the frequencies.
        sinusoids: whether every layer has a table of max_position_embeddings rows of rotary_dim instead (GPT-J).
        rotary_tables: how often: one for full and one for sliding attention (Gemma 3).
        unused_rotary: whether the tables exist whatever the positions are (Falcon with ALiBi).
        scalars: buffers of one element (Gemma's embedding scale).
        masks: where a causal mask of max_position_embeddings squared is held: once, or in every layer.
    """

    rotary_fraction: float = 1.0
    sinusoids: bool = False
    rotary_tables: int = 1
    unused_rotary: bool = False
    scalars: int = 0
    masks: Literal["model", "layer"] | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to read a field, and when it counts."""

    how: str
    keys: tuple[str, ...]
    value: object
    when: dict[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class _Family:
    """One file of data; `rules` and `translate` go by the dotted path of our field."""

    name: str
    fixed: dict[str, Any]
    rules: dict[str, tuple[Rule, ...]]
    defaults: dict[str, object]
    translate: dict[str, dict[object, object]]
    require: dict[str, list[object]]
    buffers: Buffers
    not_modelled: tuple[str, ...]

    @property
    def read(self) -> dict[str, tuple[str, ...]]:
        """The keys on which each field depends."""
        return {
            field: tuple(key for rule in rules for key in (*rule.keys, *rule.when))
            for field, rules in self.rules.items()
        }


def read_hf_config(config: dict[str, object], where: str) -> dict[str, object]:
    """The raw `model:` block that a config.json stands for, `architecture` included.

    Fields that the family fixes are left out: `family_defaults` gives them wherever `architecture` is set.

    Args:
        config: the parsed config.json.
        where: what to call it in errors, e.g. its path.

    Raises:
        InputError: when the model_type is unknown, or a key is missing or holds what it cannot hold.
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
            f"model_type = {_shown(model_type)} is not a text.", 'Give a name such as "llama".', f"{where}: model_type"
        )
    if model_type not in known_families() and isinstance(config.get("text_config"), dict):
        raise InputError(
            f"model_type = {_shown(model_type)} is a model of several modalities, which memcalc does not size.",
            "To size its language model alone, save the object under text_config as a file of its own.",
            f"{where}: model_type",
        )
    family = _load(model_type, f"{where}: model_type")
    _check_requirements(family, config, where)
    block: dict[str, object] = {"architecture": model_type}
    for field in family.rules:
        value = _value(family, field, config, where)
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
    return Buffers() if architecture is None else _load(architecture, "model.architecture").buffers


def family_omissions(architecture: str | None) -> tuple[str, ...]:
    """What a family's block does besides, and the plain implementation does not."""
    return () if architecture is None else _load(architecture, "model.architecture").not_modelled


@lru_cache(maxsize=1)
def _names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def family_of(architecture: str) -> str:
    """The model_type that a name stands for: "gpt2" for "gpt3"."""
    return _load(architecture, "model.architecture").name


def rules_of(family: str) -> dict[str, tuple[Rule, ...]]:
    """How each field of a family is read; of several rules the first that applies."""
    return _load(family, "model.architecture").rules


def defaults_of(family: str) -> dict[str, object]:
    """What transformers' configuration class takes where config.json leaves a key out."""
    return _load(family, "model.architecture").defaults


def translations_of(family: str, field: str) -> dict[object, object] | None:
    """Their values of a field and ours; None: they are the same."""
    return _load(family, "model.architecture").translate.get(field)


def keys_of(architecture: str) -> dict[str, list[str]]:
    """The keys of config.json that decide something of a family, and the fields that each decides."""
    family = _load(architecture, "model.architecture")
    found: dict[str, list[str]] = {"model_type": ["architecture"]}
    for field, keys in family.read.items():
        for key in keys:
            found.setdefault(key, []).append(field)
    for key in family.require:
        found.setdefault(key, ["architecture"])
    return found


def known_families() -> list[str]:
    """The names that `architecture` and `model_type` may have, sorted."""
    return list(_names())


@lru_cache(maxsize=64)
def _defaults(architecture: str) -> dict[str, object]:
    family = _load(architecture, "model.architecture")
    block: dict[str, object] = copy.deepcopy(family.fixed)
    for field in family.rules:
        # A size of some default checkpoint says nothing about the user's model.
        if field in BOOLEANS or field in PROBABILITIES or field in CHOICES:
            value = _value(family, field, {}, architecture)
            if value is not None:
                put_at(block, field, value)
    return block


def _load(name: str, where: str) -> _Family:
    if name not in _names():
        near = difflib.get_close_matches(name, _names(), n=3, cutoff=0.5)
        nearest = f" Nearest: {', '.join(near)}." if near else ""
        raise InputError(
            f"{_shown(name)} is not a model family that memcalc knows.{nearest}",
            f"Use one of {', '.join(_names())}; or leave it out and give every field of the model: block.",
            where,
        )
    return _parse(name)


@lru_cache(maxsize=64)
def _parse(name: str) -> _Family:
    data = yaml.load((FOLDER / f"{name}.yaml").read_bytes(), Loader=_Loader)
    if "same_as" in data:
        return _parse(data["same_as"])
    return _Family(
        name=name,
        fixed=data["fixed"],
        rules={field: _rules(rule) for field, rule in _flatten(data["read"]).items()},
        defaults=data["defaults"],
        translate=data.get("translate", {}),
        require=data.get("require", {}),
        buffers=Buffers(**data.get("buffers", {})),
        not_modelled=tuple(data.get("not_modelled", ())),
    )


def _flatten(rules: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for field, rule in rules.items():
        if field in ("moe", "mla"):
            flat.update({f"{field}.{inner}": inner_rule for inner, inner_rule in rule.items()})
        else:
            flat[field] = rule
    return flat


def _rules(raw: Any) -> tuple[Rule, ...]:
    cases = raw["cases"] if isinstance(raw, dict) and "cases" in raw else [raw]
    return tuple(_rule(case) for case in cases)


def _rule(raw: Any) -> Rule:
    if not isinstance(raw, dict):
        raw = {"read": raw}
    when = raw.get("when", {})
    how, given = next((how, given) for how, given in raw.items() if how != "when")
    if how == "value":
        return Rule(how, (), given, when)
    return Rule(how, (given,) if isinstance(given, str) else tuple(given), None, when)


def put_at(block: dict[str, object], field: str, value: object) -> None:
    """Sets "a.b" as b of the object a."""
    outer, _, inner = field.rpartition(".")
    target = block.setdefault(outer, {}) if outer else block
    assert isinstance(target, dict)
    target[inner] = value


def _check_requirements(family: _Family, config: dict[str, object], where: str) -> None:
    for key, allowed in family.require.items():
        value = _looked_up(config, key)
        value = allowed[0] if value is _ABSENT else value
        # `1 == True` and `1.0 == 1` in Python, but not in a config.
        if not any(value == other and type(value) is type(other) for other in allowed):
            raise InputError(
                f"{_shown(value)} describes a variant of {family.name} that memcalc does not model.",
                f"It models {key} = {_shown(allowed[0])} only.",
                f"{where}: {key}",
            )


def _value(family: _Family, field: str, config: dict[str, object], where: str) -> object:
    """Our value of one field, checked; None: leave it unset."""
    rule = next(rule for rule in family.rules[field] if _applies(family, rule, config))
    if rule.how != "read":
        return _computed(family, field, rule, config, where)
    key, value = _found(family, field, rule.keys, config, where)
    table = family.translate.get(field)
    if table is not None and (value is None or None not in table):  # a null entry stands in for null alone
        return _translated(family, key, value, table, where)
    if value is None and field in _DERIVED:
        return None
    return _checked(key, value, _kind(field), where)


def _applies(family: _Family, rule: Rule, config: dict[str, object]) -> bool:
    for key, wanted in rule.when.items():
        value = _looked_up(config, key)
        if value is _ABSENT or value is None:
            value = family.defaults.get(key)
        if type(value) is not type(wanted) or value != wanted:
            return False
    return True


def _computed(family: _Family, field: str, rule: Rule, config: dict[str, object], where: str) -> object:
    """The value of a field that is not just what one key holds."""
    if rule.how == "value":
        return rule.value
    if rule.how in ("product", "quotient"):
        kind = "count" if rule.how == "product" else "size"
        found = [_checked(*_found(family, field, (key,), config, where), kind, where) for key in rule.keys]
        sizes = [size for size in found if isinstance(size, int)]
        return math.prod(sizes) if rule.how == "product" else sizes[0] // sizes[1] or None
    key, value = _found(family, field, rule.keys, config, where)
    if rule.how == "share":
        if value is None:
            return None
        share = _checked(key, value, "share", where)
        head = _value(family, "head_dim", config, where) if "head_dim" in family.rules else None
        if head is None:
            hidden, heads = (_value(family, name, config, where) for name in ("hidden_size", "num_attention_heads"))
            assert isinstance(hidden, int) and isinstance(heads, int)  # noqa: PT018 - both are checked sizes
            head = hidden // heads
        assert isinstance(share, float) and isinstance(head, int)  # noqa: PT018
        return int(head * share)
    return _other_layers(family, rule.how, key, value, config, where)


def _other_layers(
    family: _Family, how: str, key: str, value: object, config: dict[str, object], where: str
) -> list[int]:
    """The layers that a list does not name, or those behind one."""
    layers = _value(family, "num_layers", config, where)
    if value is None or value == -1:
        return []
    assert isinstance(layers, int)
    if layers > _MOST_NAMED_LAYERS:
        raise InputError(f"{key} is given for {layers} layers.", "Leave it out.", f"{where}: {key}")
    if how == "after":
        last = _checked(key, value, "count", where)
        assert isinstance(last, int)
        return list(range(min(last + 1, layers), layers))
    named = _checked(key, value, "layers", where)
    assert isinstance(named, list)
    return sorted(set(range(layers)) - set(named))


def _looked_up(config: dict[str, object], key: str) -> object:
    """The value under a key, "a.b" being b of the object a."""
    value: object = config
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _found(
    family: _Family, field: str, keys: tuple[str, ...], config: dict[str, object], where: str
) -> tuple[str, object]:
    """The key that counts and its value, or transformers' default for it."""
    present = [key for key in keys if _looked_up(config, key) is not _ABSENT]
    key = next((key for key in present if _looked_up(config, key) is not None), present[0] if present else keys[0])
    value = _looked_up(config, key)
    table = family.translate.get(field, {})
    if value is None and field not in _DERIVED and None not in table:
        value = _ABSENT  # transformers' classes, too, take null for "not given"
    if value is _ABSENT:
        value = next((family.defaults[name] for name in keys if name in family.defaults), _ABSENT)
    if value is _ABSENT:
        raise InputError(
            f"the key {' or '.join(keys)} is missing, and a {family.name} model has no default for it.",
            "Give the model's whole config.json, or add the key.",
            where,
        )
    return key, value


def _kind(field: str) -> str:
    if field in BOOLEANS:
        return "boolean"
    if field in PROBABILITIES:
        return "probability"
    if field in LAYERS:
        return "layers"
    return "count" if field in COUNTS else "size"


def _translated(family: _Family, key: str, value: object, table: dict[object, object], where: str) -> object:
    # A list or an object in place of a name is unhashable, and 1 would find an entry for true.
    for theirs, ours in table.items():
        if type(theirs) is type(value) and theirs == value:
            return ours
    known = ", ".join(str(theirs) for theirs in table)
    raise InputError(
        f"{_shown(value)} is not a value that memcalc models for {family.name}.",
        f"It models {known}.",
        f"{where}: {key}",
    )


def _checked(key: str, value: object, kind: str, where: str) -> object:
    """`value` as it is, when it is of its kind; booleans are no numbers, and texts are never converted."""
    if kind == "boolean":
        if isinstance(value, bool):
            return value
        rule, remedy = "is neither true nor false.", "Write true or false, without quotes."
    elif kind == "probability":
        # NaN fails both comparisons.
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1:
            return float(value)
        rule, remedy = "is not a dropout rate: a number from 0 up to, but not, 1.", "Write a number such as 0.1."
    elif kind == "share":
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
            return float(value)
        rule, remedy = "is not a share: a number above 0, up to 1.", "Write a number such as 0.5."
    elif kind == "layers":
        if isinstance(value, list) and all(type(layer) is int and 0 <= layer <= _LARGEST_SIZE for layer in value):
            return value
        rule, remedy = "is not a list of layers.", "Write their numbers, counted from 0, in brackets."
    else:
        least = 0 if kind == "count" else 1
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST_SIZE:
            return value
        rule = f"is not a whole number from {least} to 2^40."
        remedy = "Write the size as digits, without quotes."
    raise InputError(f"{_shown(value)} {rule}", remedy, f"{where}: {key}")


def _shown(value: object) -> str:
    """A value for a message, cut where it would flood the screen."""
    try:
        text = repr(value)
    except ValueError:  # an int of more than 4300 digits has no text
        return "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _described(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
