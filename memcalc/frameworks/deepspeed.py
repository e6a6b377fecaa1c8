"""What DeepSpeed's zero_optimization block and its release decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from memcalc.frameworks.draft import FRAMEWORK, Draft, is_on
from memcalc.frameworks.weights import placed_config
from memcalc.spec.programs import PROGRAMS
from memcalc.spec.zero import AutomaticSize

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
_WIDTHS = ("hidden_size", "n_embd", "d_model")  # attribute_map of transformers 5.23 models/*/configuration_*.py
LARGEST = 2**40  # elements
_OWN_ADAM = ("adam", "adamw")  # types of an optimizer block


def place_zero(draft: Draft, zero: Mapping[str, Any]) -> None:
    """Place the sizes of a zero_optimization block, and whether reductions overlap with backward.

    Where the model's width is not known `auto` is the default. It is so for a reference model, too: TRL makes its
    engine before Trainer fills in the sizes (1.16 trainer/dpo_trainer.py, __init__), and DeepSpeed ignores `auto`
    (0.19 runtime/config_utils.py, DeepSpeedConfigModel).
    """
    if isinstance(zero.get("overlap_comm"), bool):
        draft.default("parallelism.zero_optimization.overlap_comm", zero["overlap_comm"])
    width = _width(placed_config(draft))
    filled: list[str] = []
    for ours, (names, automatic) in _SIZES.items():
        said = next((zero[name] for name in names if name in zero), None)
        size = automatic(width) if said == "auto" and width is not None else _whole(said)
        if size is not None and (size or ours != "reduce_bucket_size"):
            draft.default(f"parallelism.zero_optimization.{ours}", size)
        filled += [ours] if said == "auto" and ours in get_args(AutomaticSize) else []
    if filled:
        draft.default("parallelism.zero_optimization.automatic", tuple(filled))


def _width(config: Mapping[str, Any]) -> int | None:
    """Return the hidden size of a model, or of its text part, by the names that transformers reads as one."""
    text = config.get("text_config")
    blocks = (config, text if isinstance(text, Mapping) else {})
    found = (block[name] for block in blocks for name in _WIDTHS if type(block.get(name)) is int)
    return next(found, None)


def place_groups(draft: Draft, config: Mapping[str, Any]) -> None:
    """Place the parameter groups of the optimizer that Trainer makes, unless DeepSpeed makes it.

    Trainer has a group with weight decay and one without, even if the decay is 0 (transformers 5.23 trainer.py,
    create_optimizer). DeepSpeed gets all parameters as one group (integrations/deepspeed.py, deepspeed_optim_sched).
    """
    if "optimizer" not in config and draft.values.get(FRAMEWORK) != "accelerate":
        draft.default("parallelism.zero_optimization.separate_no_decay", True)


def place_cast(draft: Draft, *, low: bool) -> None:
    """Place whether zero.Init casts weights from fp32; `low`: from_pretrained makes them in 16 bits."""
    if draft.given("parallelism.zero_stage") == 3 and not low:
        draft.default("parallelism.zero_optimization.casts_fp32_weights", True)


def place_adapter_dtype(draft: Draft) -> None:
    """Place the dtype of adapters under stage 3, where from_pretrained makes the base model with zero.Init.

    PEFT makes them in fp32 (0.21 tuners/tuners_utils.py, cast_adapter_dtype), unless TRL asks for the dtype of the base
    model (1.7 trl/trainer/sft_trainer.py, autocast_adapter_dtype). DeepSpeed does not cast the weights of such a model
    (0.19 runtime/engine.py, _cast_module_mixed_precision).
    """
    if draft.given("parallelism.zero_stage") == 3 and draft.values.get("training.finetune") == "lora":
        program = PROGRAMS.get(str(draft.values.get(FRAMEWORK)))
        follows = program is not None and program.package == "trl" and draft.has("trl", "1.7")
        draft.default("training.lora.adapter_dtype", "compute" if follows else "fp32")


def runs_deepspeed(draft: Draft) -> bool:
    """Return whether DeepSpeed trains: it is named, or is the default library of ZeRO 1 and 2."""
    engine, stage = draft.given("parallelism.engine"), draft.given("parallelism.zero_stage")
    return stage is not None and (engine == "deepspeed" or (engine is None and stage in (1, 2)))


def is_pytorchs_adam(optimizer: Any) -> bool:
    """Return whether an optimizer block asks for PyTorch's Adam.

    DeepSpeed's own updates in place like PyTorch's fused one (DeepSpeed 0.19 runtime/engine.py,
    _configure_basic_optimizer; ops/adam/fused_adam.py).
    """
    params = optimizer.get("params") if isinstance(optimizer, Mapping) else None
    return isinstance(params, Mapping) and is_on(params.get("torch_adam"))


def place_own_adam(draft: Draft, optimizer: Any, stage: object) -> None:
    """Place whether DeepSpeed's own Adam updates 16-bit weights, which it flattens without ZeRO."""
    named = isinstance(optimizer, Mapping) and str(optimizer.get("type")).lower() in _OWN_ADAM
    if stage == 0 and named and not is_pytorchs_adam(optimizer):
        draft.default("parallelism.zero_optimization.own_adam", True)
        draft.default("training.optimizer_implementation", "fused")


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
