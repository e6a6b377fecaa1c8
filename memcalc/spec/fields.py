"""Valid names in a configuration: blocks, fields, the papers' symbols; and the nearest name to a wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memcalc.errors import InputError
from memcalc.spec.finetuning import LoraSpec, QloraSpec
from memcalc.spec.fsdp import FsdpSpec
from memcalc.spec.inference import InferenceSpec
from memcalc.spec.model import (
    ConfigBlock,
    FullAttentionSpec,
    LinearAttentionSpec,
    MambaSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
)
from memcalc.spec.optimizers import OptimizerOptions
from memcalc.spec.programs import VersionsSpec
from memcalc.spec.training import HardwareSpec, ParallelismSpec, TrainingSpec
from memcalc.spec.words import advice_for, field_of, foreign_names, is_foreign_name, translated
from memcalc.spec.yaml_source import Path, YamlSource
from memcalc.spec.zero import ZeroSpec

BLOCKS: dict[str, type[ConfigBlock]] = {
    "model": ModelSpec,
    "training": TrainingSpec,
    "parallelism": ParallelismSpec,
    "hardware": HardwareSpec,
    "inference": InferenceSpec,
}

# Addressed by full path only: a bare name must not turn a training run into inference.
BY_PATH = ("inference",)

# Nested blocks by name, and their parents. Names are unique, so `--set lora.rank=8` is sufficient.
NESTED: dict[str, type[ConfigBlock]] = {
    "moe": MoeSpec,
    "mla": MlaSpec,
    "linear_attention": LinearAttentionSpec,
    "full_attention": FullAttentionSpec,
    "mamba": MambaSpec,
    "lora": LoraSpec,
    "qlora": QloraSpec,
    "optimizer_options": OptimizerOptions,
    "versions": VersionsSpec,
    "fsdp": FsdpSpec,
    "zero_optimization": ZeroSpec,
}
HOME = {
    **dict.fromkeys(("moe", "mla", "linear_attention", "full_attention", "mamba"), "model"),
    **dict.fromkeys(("lora", "qlora", "optimizer_options", "versions"), "training"),
    **dict.fromkeys(("fsdp", "zero_optimization"), "parallelism"),
}

SYMBOLS: dict[str, dict[str, str]] = {
    "model": {"l": "num_layers", "d": "hidden_size", "h": "num_attention_heads", "V": "vocab_size"},
    "training": {"b": "micro_batch_size", "s": "sequence_length"},
}

TOP_LEVEL = ("name", *BLOCKS, "preset", "hf_config")
MODEL_SOURCES = ("preset", "hf_config")


def canonical_block(block: str, raw: Any, source: YamlSource) -> dict[str, Any]:
    """Return the fields of one block under their full names; keys without a value are omitted.

    Errors go to `source.faults`: the block is not a mapping, a key is unknown, or a field has two names.
    """
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        remedy = f"Write `{block}:` and its fields indented below it."
        source.faults.append(InputError(f"{describe(raw)} is not a block of fields.", remedy, source.where((block,))))
        return {}
    fields = BLOCKS[block].model_fields
    result: dict[str, Any] = {}
    words: dict[str, Any] = {}
    key: str
    for key, value in raw.items():
        name = SYMBOLS.get(block, {}).get(key, key)
        path: Path = (block, key)
        if _is_both(name) and not isinstance(value, dict):
            words[key] = value
            continue
        if name not in fields and not (block == "model" and name in MODEL_SOURCES):
            if is_foreign_name(key, block):
                words[key] = value
            else:
                source.faults.append(unknown_key(key, block, source.where(path)))
            continue
        if name in result:
            other = next(given for given in raw if given != key and SYMBOLS.get(block, {}).get(given, given) == name)
            where = source.where(path)
            source.faults.append(InputError(f"{key} and {other} name the same field.", "Keep one of the two.", where))
            continue
        if path in source.lines:  # messages name the field, with the line of its alias
            source.lines.setdefault((block, name), source.lines[path])
        if value is None:
            continue
        result[name] = _nested(name, value, source) if HOME.get(name) == block else value
    # After all of memcalc's fields, so that an alias adds to a nested block regardless of their order.
    for key, value in words.items():
        _put_word(result, key, value, (block, key), source)
    return result


def _put_word(result: dict[str, Any], key: str, value: Any, path: Path, source: YamlSource) -> None:
    """Set the fields of another program's field name.

    Errors go to `source.faults`: the value is unknown, or the field already has another value.
    """
    try:
        found = {} if value is None else translated(key, value, source.where(path))
    except InputError as error:
        source.faults.append(error)
        return
    for place, ours in found.items():
        _, *outer, field = map(str, place)
        target: Any = result
        for part in outer:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):  # such as `moe: 8`, which Pydantic rejects
                return
        if field in target and target[field] != ours:
            problem = (
                f"{key} sets {field} = {describe(ours)}, but another line sets {field} = {describe(target[field])}."
            )
            source.faults.append(InputError(problem, "Keep one of the two.", source.where(path)))
            continue
        target[field] = ours
        if path in source.lines:
            source.lines.setdefault(place, source.lines[path])


def _nested(name: str, raw: Any, source: YamlSource) -> Any:
    if not isinstance(raw, dict):
        return raw  # Pydantic reports the error
    fields, home = list(NESTED[name].model_fields), HOME[name]
    source.faults.extend(
        _unknown(key, f"{home}.{name}", fields, source.where((home, name, key))) for key in raw if key not in fields
    )
    return {key: value for key, value in raw.items() if value is not None and key in fields}


def _is_both(name: str) -> bool:
    """Return whether a name is both a nested block and another program's field: `fsdp: full_shard`."""
    return name in NESTED and is_foreign_name(name)


def find_field(name: str) -> Path | None:
    """Return the path of a field given by its full path, bare name or symbol: "b" -> ("training", "micro_batch_size").

    A name that is both a block and an alias is the alias if it has no further part.
    """
    block, _, rest = name.partition(".")
    if _is_both(rest or block):
        return None
    if block in NESTED and rest:
        return (HOME[block], block, rest) if rest in NESTED[block].model_fields else None
    if rest:
        first, _, inner = rest.partition(".")
        if HOME.get(first) == block and inner:
            return (block, first, inner) if inner in NESTED[first].model_fields else None
        field = SYMBOLS.get(block, {}).get(rest, rest)
        if block == "model" and field in MODEL_SOURCES:
            return (field,)
        return (block, field) if block in BLOCKS and field in BLOCKS[block].model_fields else None
    if name in ("name", *MODEL_SOURCES):
        return (name,)
    for candidate, model in BLOCKS.items():
        field = SYMBOLS.get(candidate, {}).get(name, name)
        if field in model.model_fields and candidate not in BY_PATH:
            return (candidate, field)
    return None


def all_field_names() -> list[str]:
    """Return every bare field name and symbol, for suggestions."""
    names = ["name", *MODEL_SOURCES, *(f"{block}.{field}" for block in NESTED for field in NESTED[block].model_fields)]
    for block, model in BLOCKS.items():
        names += [] if block in BY_PATH else [*model.model_fields, *SYMBOLS.get(block, {})]
        names += [f"{block}.{field}" for field in model.model_fields]
    return names


def unknown_key(key: str, block: str, where: str) -> InputError:
    """Return the error for a key that a block does not have; it names another block that has it."""
    advice = advice_for(key)
    if advice is not None:
        return InputError(f"unknown field {_clip(key)!r} in {block}.", advice, where)
    elsewhere = next((other for other in BLOCKS if other != block and is_foreign_name(key, other)), None)
    if elsewhere is not None:
        problem = f"{key} is a field of {elsewhere}, not of {block}."
        return InputError(problem, f"Move {key} below {elsewhere}:.", where)
    for other, model in BLOCKS.items():
        if other != block and SYMBOLS.get(other, {}).get(key, key) in model.model_fields:
            problem = f"{key} is a field of {other}, not of {block}."
            return InputError(problem, f"Move {key} below {other}:.", where)
    fields = [*BLOCKS[block].model_fields, *SYMBOLS.get(block, {})]
    return _unknown(key, block, fields, where, [name for name in foreign_names() if is_foreign_name(name, block)])


def unknown_override(name: str, where: str) -> InputError:
    """Return the error for a name that `--set` cannot find."""
    if name in BLOCKS:
        example = next(iter(BLOCKS[name].model_fields))
        return InputError(f"{name} is a block of fields.", f"Set a field, such as {name}.{example}.", where)
    advice = advice_for(name)
    if advice is not None:
        return InputError(f"unknown field {_clip(name)!r}.", advice, where)
    elsewhere = find_field(name.rpartition(".")[2])
    close = ".".join(map(str, elsewhere)) if elsewhere and "." in name else field_of(name.rpartition(".")[2])
    close = close or nearest(name, [*all_field_names(), *foreign_names()])
    block, _, field = name.rpartition(".")
    if block and close == block and block in NESTED:
        return _unknown(field, block, list(NESTED[block].model_fields), where)
    remedy = f"Did you mean {close}?" if close else "`memcalc schema` lists all fields."
    return InputError(f"unknown field {_clip(name)!r}.", remedy, where)


def unknown_top_level(key: str, where: str) -> InputError:
    """Return the error for a top-level key that is not a block."""
    place = find_field(key)
    block = next((block for block in BLOCKS if is_foreign_name(key, block)), None) if place is None else place[0]
    if block in BLOCKS:
        return InputError(f"{key!r} is outside its block.", f"Move {key} below {block}:.", where)
    advice = advice_for(key)
    if advice is not None:
        return InputError(f"unknown field {_clip(key)!r}.", advice, where)
    return _unknown(key, "", list(TOP_LEVEL), where)


_MOST_LISTED = 12  # fields of a block that a message lists


def _unknown(key: str, block: str, fields: list[str], where: str, unlisted: Sequence[str] = ()) -> InputError:
    """Return the error for a key that is neither in `fields` nor in `unlisted`, which are accepted and not listed."""
    close = nearest(key, fields) or nearest(key, list(unlisted))
    listed = (
        f"Choose from {', '.join(fields)}." if len(fields) <= _MOST_LISTED else "`memcalc schema` lists all fields."
    )
    remedy = f"Did you mean {close}?" if close else listed
    place = f" in {block}" if block else ""
    return InputError(f"unknown field {_clip(key)!r}{place}.", remedy, where)


def nearest(name: str, known: list[str]) -> str | None:
    """Return the known name closest to `name`, by its words, then by its letters; None if none is close.

    A field of the block that `name` begins with has to be close in its own name.
    """
    import difflib  # imported late: only for error messages

    name, cutoff = name[:80], 0.6
    words = set(name.split("_"))
    matches = difflib.get_close_matches(name, known, n=8, cutoff=cutoff)  # the closest first, which max() keeps
    whole = max((each for each in known if name.startswith(f"{each}_")), key=len, default=None)
    if whole is not None:
        begin = len(whole) + 1
        others = [each for each in matches if not each.startswith(f"{whole}.")]
        own = difflib.get_close_matches(name[begin:], [each[begin:] for each in matches], n=8, cutoff=cutoff)
        matches = [each for each in matches if each in others or each[begin:] in own]
    return max(matches, key=lambda each: len(words.intersection(each.split("_"))), default=whole)


def describe(value: Any) -> str:
    """Return an invalid value, short enough for a message."""
    if isinstance(value, dict):
        return "a block"
    if isinstance(value, list | tuple):
        return "a list"
    return _clip(repr(value))


def _clip(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
