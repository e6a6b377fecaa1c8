"""Data files of model families: how a Hugging Face `config.json` becomes a `model:` block.

There is one file per model_type in memcalc/data/families, with these keys:

    same_as    another family that this name is an alias of; then there are no other keys
    source     the code that the file was derived from
    fixed      memcalc's fields that the family's code determines, regardless of the config
    read       memcalc's field: the config's key ("a.b" is in the object a), or a list of keys of which the first one
               present counts, or one of the mappings below; the blocks of `ModelSpec`, such as `moe`, are nested
    defaults   the config's key: the default of transformers' configuration class
    translate  memcalc's field: {the config's value: memcalc's value}; other values are rejected. The value that `mlp`
               is read from also decides which gelu is meant: `GELUS`
    require    the config's key: the values for which the block is valid; the first one is the default, unless
               `defaults` has another
    full_layers  the config's key with other values of some layers: the key with the types of all layers; the former
               must be of the layers with "full_attention" and no others, with equal values
    last       the config's key: the word that its list, with one entry per layer, must end with
    buffers    the buffers that transformers registers; see `FamilyBuffers`
    eager_only     whether transformers' modules reject `sdpa`
    sdpa_until     the last release of transformers with modules that support `sdpa`, as far as known; "": none
    flash_package  whether they support the kernels of flash-attn nevertheless
    fused_attention   the fused kernel that `sdpa` takes; flash unless the modules pass what flash has no kernel for
    not_modelled   features of the family's block that the plain implementation lacks
    in_fp32     modules of a layer that transformers builds in fp32, regardless of the dtype of the others

If one key is not sufficient, a field reads

    {product: [keys]}, {quotient: [two keys]}      of sizes; the quotient is rounded down
    {share: keys}                                  a fraction of the head dimension
    {except: key}, {after: key}                    the layers that a list omits; those after a layer, -1 the last
    {before: key}                                  so many of the first layers
    {every: key}, {others: key}                    of a list with one entry per layer: n if every n-th one, and no
                                                   other, is "full_attention" (or 0), else 0; else these layers
    {in_full_layers: [key, of_each]}               the value in the objects of layers with full attention, by layer,
                                                   under a key; if they lack it, that of all layers
    {pattern: keys}, {length: keys}                of a list with the type of each layer, or the same as letters: the
                                                   letters of `layer_pattern`; their number
    {value: ours}                                  the same value for every config
    {cases: [{when: {key: value, ...}, ...}, ...]} the first case that matches the config; the last has no `when`

transformers itself is not imported: only sizes are read.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from memcalc.errors import InputError
from memcalc.spec.model_families.field_types import shown

# transformers' names of gelu activations; all other names are other activations.
GELUS: dict[object, object] = {"gelu": "exact", "gelu_pytorch_tanh": "tanh", "gelu_new": "new", "gelu_fast": "fast"}

FOLDER = Path(__file__).parents[2] / "data" / "families"

# CSafeLoader is about ten times faster, but absent if PyYAML was built without libyaml.
_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class FamilyBuffers:
    """Buffers that transformers registers for a family and that do not follow from ModelSpec."""

    sinusoids: bool = False  # every layer has a table of max_position_embeddings rows of rotary_dim instead (GPT-J)
    rotary_tables: int = 1  # number of RoPE caches: one for full and one for sliding attention (Gemma 3)
    unused_rotary: bool = False  # the RoPE cache exists regardless of the position embedding (Falcon with ALiBi)
    scalars: int = 0  # number of buffers of one element (Gemma's embedding scale)
    layer_scalars: int = 0  # the same in every layer (xIELU's two constants)
    # place of a causal mask of max_position_embeddings squared: once in the model, or in every layer
    masks: Literal["model", "layer"] | None = None
    narrow_corrections: bool = False  # router biases have the weights' dtype instead of fp32


@dataclass(frozen=True, slots=True)
class FieldRule:
    """One way to read a field, and the condition for it."""

    how: str
    keys: tuple[str, ...]
    value: object
    when: dict[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class FamilyFile:
    """One data file; the keys of `rules` and `translate` are dotted paths of memcalc's fields."""

    name: str
    fixed: dict[str, Any]
    rules: dict[str, tuple[FieldRule, ...]]
    defaults: dict[str, object]
    translate: dict[str, dict[object, object]]
    require: dict[str, list[object]]
    last: dict[str, str]
    full_layers: dict[str, str]
    buffers: FamilyBuffers
    eager_only: bool
    sdpa_until: str
    flash_package: bool
    fused_attention: str
    not_modelled: tuple[str, ...]
    in_fp32: tuple[str, ...]

    @property
    def read(self) -> dict[str, tuple[str, ...]]:
        """The keys that each field depends on."""
        return {
            field: tuple(key for rule in rules for key in (*rule.keys, *rule.when))
            for field, rules in self.rules.items()
        }

    @property
    def needed_keys(self) -> dict[str, object]:
        """The keys that a config.json must have, because transformers' default is a variant without formulas."""
        required = self.require.items()
        return {key: allowed[0] for key, allowed in required if self.defaults.get(key, allowed[0]) not in allowed}


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """Return the families with a data file, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


LISTED = "`memcalc models` lists the families with formulas."  # a list of fifty names would be too long


def family_named(name: str, where: str = "model.architecture") -> FamilyFile:
    """Return a family by its name.

    Raises:
        InputError: the family is unknown; the message suggests the nearest names.
    """
    if name not in names():
        raise InputError(
            f"memcalc has no formulas for the model family {shown(name)}.{nearest(name)}",
            f"{LISTED} Or leave architecture out and set every field of the model: block.",
            where,
        )
    return parsed(name)


def nearest(name: str) -> str:
    """Return a sentence with the families that have similar names; "" if there are none."""
    near = difflib.get_close_matches(name, names(), n=3, cutoff=0.5)
    return f" Nearest: {', '.join(near)}." if near else ""


@lru_cache(maxsize=64)
def parsed(name: str) -> FamilyFile:
    """Return the parsed file of a known family, or of the family that it is an alias of."""
    data = yaml.load((FOLDER / f"{name}.yaml").read_bytes(), Loader=_Loader)
    if "same_as" in data:
        return parsed(data["same_as"])
    rules = {field: _rules(rule) for field, rule in flattened(data["read"]).items()}
    translate = data.get("translate", {})
    if "mlp" in rules:
        rules["gelu"] = rules["mlp"]
        translate["gelu"] = {word: GELUS.get(word, "exact") for word in translate["mlp"]}
    return FamilyFile(
        name=name,
        fixed=data["fixed"],
        rules=rules,
        defaults=data["defaults"],
        translate=translate,
        require=data.get("require", {}),
        last=data.get("last", {}),
        full_layers=data.get("full_layers", {}),
        buffers=FamilyBuffers(**data.get("buffers", {})),
        eager_only=data.get("eager_only", False),
        sdpa_until=data.get("sdpa_until", ""),
        flash_package=data.get("flash_package", False),
        fused_attention=data.get("fused_attention", "flash"),
        not_modelled=tuple(data.get("not_modelled", ())),
        in_fp32=tuple(data.get("in_fp32", ())),
    )


def flattened(rules: dict[str, Any]) -> dict[str, Any]:
    """Return the rules with nested blocks flattened to dotted names."""
    flat: dict[str, Any] = {}
    for field, rule in rules.items():
        if field in ("moe", "mla", "linear_attention", "full_attention", "mamba"):
            flat.update({f"{field}.{inner}": inner_rule for inner, inner_rule in rule.items()})
        else:
            flat[field] = rule
    return flat


def _rules(raw: Any) -> tuple[FieldRule, ...]:
    cases = raw["cases"] if isinstance(raw, dict) and "cases" in raw else [raw]
    return tuple(_rule(case) for case in cases)


def _rule(raw: Any) -> FieldRule:
    if not isinstance(raw, dict):
        raw = {"read": raw}
    when = raw.get("when", {})
    how, given = next((how, given) for how, given in raw.items() if how != "when")
    if how == "value":
        return FieldRule(how, (), given, when)
    return FieldRule(how, (given,) if isinstance(given, str) else tuple(given), None, when)
