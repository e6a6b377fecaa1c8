"""Defaults of a `model:` block that are derived from its other fields."""

from __future__ import annotations

from math import gcd

from memcalc.errors import InputError
from memcalc.spec.model import EXPERTS, MAMBA, repeated_pattern
from memcalc.spec.model_families.conversion import family_defaults, rotary_fraction

_NESTED = ("moe", "mla", "linear_attention", "full_attention", "mamba")
_MOST_LAYERS = 2**16
_WITH_GELU = ("gelu", "geglu")


def derive_model(raw: dict[str, object]) -> dict[str, object]:
    """Return a raw `model:` block (canonical field names) with the family's defaults, then the derived ones.

    A key without a value counts as omitted. ModelSpec validates types: a derivation from values that are not positive
    whole numbers is skipped.

    Raises:
        InputError: the architecture is unknown, or the hidden size cannot be split into heads.
    """
    model = _given(raw)
    architecture = model.get("architecture")
    if isinstance(architecture, str):
        defaults = family_defaults(architecture)
        if model.get("mlp") not in (None, *_WITH_GELU):
            defaults.pop("gelu", None)  # it belongs to the family's default activation
        model = _merged(defaults, model)
    _fit_blocks(model)
    hidden_size = _size(model.get("hidden_size"))
    heads = _size(model.get("num_attention_heads"))
    if heads is not None:
        model.setdefault("num_key_value_heads", heads)
    if hidden_size is not None:
        model.setdefault("intermediate_size", 4 * hidden_size)
        model.setdefault("embedding_size", hidden_size)
    if "mla" in model:
        _derive_latent_head(model)
    elif "head_dim" not in model and hidden_size is not None and heads is not None:
        model["head_dim"] = _split_into_heads(hidden_size, heads)
    mla = model.get("mla")
    head = _size(model.get("head_dim"))
    rotated = mla.get("qk_rope_head_dim") if isinstance(mla, dict) else model.get("head_dim")
    if not isinstance(mla, dict) and head is not None and isinstance(architecture, str):
        rotated = int(head * rotary_fraction(architecture))
    model.setdefault("rotary_dim", rotated)
    return model


def _fit_blocks(model: dict[str, object]) -> None:
    """Drop `moe` and `mamba` where no layer of the pattern has such a module: only defaults of the family set them."""
    pattern = model.get("layer_pattern")
    if not isinstance(pattern, str) or not pattern:
        return
    layers = _size(model.setdefault("num_layers", len(pattern)))
    if layers is not None and layers <= _MOST_LAYERS:
        mixers = repeated_pattern(pattern, layers)
        for letter, block in ((EXPERTS, "moe"), (MAMBA, "mamba")):
            if letter not in mixers:
                model.pop(block, None)


def _given(block: dict[str, object]) -> dict[str, object]:
    given = {key: value for key, value in block.items() if value is not None}
    for key in _NESTED:
        inner = given.get(key)
        if isinstance(inner, dict):
            given[key] = {name: value for name, value in inner.items() if value is not None}
    return given


def _merged(defaults: dict[str, object], given: dict[str, object]) -> dict[str, object]:
    merged = defaults | given
    for key in _NESTED:
        default, own = defaults.get(key), given.get(key)
        if isinstance(default, dict) and isinstance(own, dict):
            merged[key] = default | own
    return merged


def _derive_latent_head(model: dict[str, object]) -> None:
    """Set the head dimension of latent attention: the dimensions without and with RoPE, concatenated."""
    mla = model["mla"]
    if not isinstance(mla, dict):
        return
    plain, rotated = _size(mla.get("qk_nope_head_dim")), _size(mla.get("qk_rope_head_dim"))
    if plain is None or rotated is None:
        return
    given = _size(model.setdefault("head_dim", plain + rotated))
    if given is not None and given != plain + rotated:
        raise InputError(
            f"head_dim = {given} differs from the head dimension of latent attention: "
            f"qk_nope_head_dim + qk_rope_head_dim = {plain} + {rotated} = {plain + rotated}.",
            f"Leave head_dim out, or set {plain + rotated}.",
            "model.head_dim",
        )


def _split_into_heads(hidden_size: int, heads: int) -> int:
    if hidden_size % heads == 0:
        return hidden_size // heads
    # The largest divisor below `heads`, or, if it is far away, the greatest common divisor.
    nearest = range(min(heads, hidden_size), max(heads - 4096, 0), -1)
    below = next((count for count in nearest if hidden_size % count == 0), gcd(hidden_size, heads))
    raise InputError(
        f"num_attention_heads = {heads} does not divide hidden_size = {hidden_size}.",
        f"Set num_attention_heads to a divisor, such as {below}, or set head_dim.",
        "model.num_attention_heads",
    )


def _size(value: object) -> int | None:
    """Return `value` if it can be a size, else None; a Boolean cannot."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
