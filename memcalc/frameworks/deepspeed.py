"""What DeepSpeed's zero_optimization block and its release decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from memcalc.frameworks.draft import Draft
from memcalc.frameworks.weights import placed_config

# Our sizes, DeepSpeed's names, and the value of `auto` in a model of this size (transformers 5.23
# integrations/deepspeed.py, trainer_config_finalize; accelerate 1.15 accelerator.py, _prepare_deepspeed).
_SIZES: dict[str, tuple[tuple[str, ...], Callable[[int], int]]] = {
    "reduce_bucket_size": (("reduce_bucket_size",), lambda width: width * width),
    "prefetch_bucket_size": (
        ("stage3_prefetch_bucket_size", "prefetch_bucket_size"),
        lambda width: int(0.9 * width * width),
    ),
    "param_persistence_threshold": (
        ("stage3_param_persistence_threshold", "param_persistence_threshold"),
        lambda width: 10 * width,
    ),
}
LARGEST = 2**40  # elements


def place_zero(draft: Draft, zero: Mapping[str, Any]) -> None:
    """Place the sizes of a zero_optimization block; where the model's width is not known `auto` is the default."""
    config = placed_config(draft)
    text = config.get("text_config")
    width = config.get("hidden_size", text.get("hidden_size") if isinstance(text, Mapping) else None)
    for ours, (names, automatic) in _SIZES.items():
        said = next((zero[name] for name in names if name in zero), None)
        size = automatic(width) if said == "auto" and type(width) is int else _whole(said)
        if size is not None and (size or ours != "reduce_bucket_size"):
            draft.default(f"parallelism.zero_optimization.{ours}", size)


def shards_with_deepspeed(draft: Draft) -> bool:
    """Return whether DeepSpeed shards the run: it is named, or is the default library of ZeRO 1 and 2."""
    engine, stage = draft.given("parallelism.engine"), draft.given("parallelism.zero_stage")
    return bool(stage) and (engine == "deepspeed" or (engine is None and stage in (1, 2)))


def place_copies(draft: Draft) -> None:
    """Place the copy of fp32 weights that stage 3 makes, by the release."""
    third = draft.given("parallelism.engine") == "deepspeed" and draft.given("parallelism.zero_stage") == 3
    if third and draft.given("training.recipe") == "fp32" and draft.has("deepspeed", "0.19"):
        draft.default("parallelism.zero_optimization.copies_fp32_weights", True)


def _whole(said: Any) -> int | None:
    """Return a number of elements; YAML reads 5e8 as a string, JSON as a float."""
    if isinstance(said, bool):
        return None
    try:
        found = float(said)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(found) if 0 <= found <= LARGEST else None
