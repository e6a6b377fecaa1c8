"""Files of model families: how a Hugging Face `config.json` becomes our `model:` block, as data.

One file a model_type in memcalc/data/families, with these keys:

    same_as    another family that this name stands for; nothing else is given then
    source     the code that the file was read from
    fixed      our fields that the family's code settles whatever the config says
    read       our field: their key ("a.b" lies in the object a), or a list of keys of which the first that is present
               counts, or one of the mappings below; `moe` and `mla` are nested
    defaults   their key: what transformers' configuration class takes where config.json leaves it out
    translate  our field: {their value: our value}; a value outside the table is refused. The word that `mlp` is read
               from says which gelu is meant, too: `GELUS`
    require    their key: the values (the first one is the default) for which our block holds at all
    buffers    what transformers registers as buffers; see `Buffers`
    eager_only     whether transformers' modules attend by products alone, and refuse `sdpa`
    not_modelled   what the family's block does besides, and the plain implementation does not
    in_fp32     modules of a layer whose weights transformers builds in fp32, whatever the others are in

Where one key is not the whole story, a field reads

    {product: [keys]}, {quotient: [two keys]}      of sizes; the quotient is rounded down
    {share: keys}                                  of the width of a head
    {except: key}, {after: key}                    the layers that a list leaves out; those behind a layer, -1 the last
    {before: key}                                  as many layers, the first ones
    {every: key}, {others: key}                    of a list with a word for each layer: n if each n-th one, and no
                                                   other, is "full_attention" (or 0), else 0; else the layers that are
    {value: ours}                                  the same for every config
    {cases: [{when: {key: value, ...}, ...}, ...]} the first of these for which the config says so; the last has no when

transformers itself is never imported: sizes are only read.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from memcalc.errors import InputError
from memcalc.spec.family_values import shown

# transformers' words for activations, and which gelu each is; all others are no gelu.
GELUS: dict[object, object] = {"gelu": "exact", "gelu_pytorch_tanh": "tanh", "gelu_new": "new", "gelu_fast": "fast"}

FOLDER = Path(__file__).parent.parent / "data" / "families"

# CSafeLoader is some ten times faster, but is absent where PyYAML was built without libyaml.
_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Buffers:
    """Buffers that transformers registers for a family, beside what ModelSpec tells.

    Args:
        sinusoids: whether every layer has a table of max_position_embeddings rows of rotary_dim instead (GPT-J).
        rotary_tables: how often: one for full and one for sliding attention (Gemma 3).
        unused_rotary: whether the tables exist whatever the positions are (Falcon with ALiBi).
        scalars: buffers of one element (Gemma's embedding scale).
        masks: where a causal mask of max_position_embeddings squared is held: once, or in every layer.
        narrow_corrections: whether router corrections are built in the weights' dtype, not in fp32.
    """

    sinusoids: bool = False
    rotary_tables: int = 1
    unused_rotary: bool = False
    scalars: int = 0
    masks: Literal["model", "layer"] | None = None
    narrow_corrections: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to read a field, and when it counts."""

    how: str
    keys: tuple[str, ...]
    value: object
    when: dict[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One file of data; `rules` and `translate` go by the dotted path of our field."""

    name: str
    fixed: dict[str, Any]
    rules: dict[str, tuple[Rule, ...]]
    defaults: dict[str, object]
    translate: dict[str, dict[object, object]]
    require: dict[str, list[object]]
    buffers: Buffers
    eager_only: bool
    not_modelled: tuple[str, ...]
    in_fp32: tuple[str, ...]

    @property
    def read(self) -> dict[str, tuple[str, ...]]:
        """The keys on which each field depends."""
        return {
            field: tuple(key for rule in rules for key in (*rule.keys, *rule.when))
            for field, rules in self.rules.items()
        }


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """The families that there is a file of, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


LISTED = "`memcalc models` lists the families that it has formulas for."  # fifty names would drown a message


def family_named(name: str, where: str) -> Family:
    """A family by its name.

    Raises:
        InputError: there is none; the message names the nearest ones.
    """
    if name not in names():
        raise InputError(
            f"{shown(name)} is not a model family that memcalc knows.{nearest(name)}",
            f"{LISTED} Or leave it out and give every field of the model: block.",
            where,
        )
    return parsed(name)


def nearest(name: str) -> str:
    """A sentence with the families whose names are like this one, if there are any."""
    near = difflib.get_close_matches(name, names(), n=3, cutoff=0.5)
    return f" Nearest: {', '.join(near)}." if near else ""


@lru_cache(maxsize=64)
def parsed(name: str) -> Family:
    """The file of a family that there is, or of the one that it stands for."""
    data = yaml.load((FOLDER / f"{name}.yaml").read_bytes(), Loader=_Loader)
    if "same_as" in data:
        return parsed(data["same_as"])
    rules = {field: _rules(rule) for field, rule in flattened(data["read"]).items()}
    translate = data.get("translate", {})
    if "mlp" in rules:
        rules["gelu"] = rules["mlp"]
        translate["gelu"] = {word: GELUS.get(word, "exact") for word in translate["mlp"]}
    return Family(
        name=name,
        fixed=data["fixed"],
        rules=rules,
        defaults=data["defaults"],
        translate=translate,
        require=data.get("require", {}),
        buffers=Buffers(**data.get("buffers", {})),
        eager_only=data.get("eager_only", False),
        not_modelled=tuple(data.get("not_modelled", ())),
        in_fp32=tuple(data.get("in_fp32", ())),
    )


def flattened(rules: dict[str, Any]) -> dict[str, Any]:
    """What `moe` and `mla` hold under dotted names, beside the rest."""
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
