"""FSDP settings in the syntax of transformers, Accelerate and axolotl: sharding, checkpoints, offload, precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.frameworks.draft import FRAMEWORK, Draft
from memcalc.importers.file_format import Meaning, fact, lacking, nothing, part
from memcalc.importers.offload import place_shards

_HOW = (
    *("auto_wrap_policy", "backward_prefetch", "backward_prefetch_policy", "cpu_ram_efficient_loading"),
    *("final_state_dict_type", "forward_prefetch", "limit_all_gathers", "min_num_params", "state_dict_type"),
    *("sync_module_states", "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap", "use_orig_params"),
    *("version", "cpu_offload_pin_memory"),
)

# transformers 5.23, training_args.py; Accelerate 1.11, utils/dataclasses.py; axolotl 0.18, utils/schemas/fsdp.py: each
# name alone or after "fsdp_".
_NAMES: dict[str, Meaning] = {
    "sharding_strategy": part("parallelism.zero_stage"),
    "reshard_after_forward": part("parallelism.zero_stage"),
    "activation_checkpointing": part("training.recompute"),
    "offload_params": part("parallelism.offload"),
    "mixed_precision_policy": lacking("a separate precision of FSDP", "the precision of the step is counted"),
    "ignored_modules": lacking("modules that are not sharded"),
    **{name: nothing("changes the implementation, not what is saved") for name in _HOW},
}

BLOCK: dict[str, Meaning] = {
    "fsdp_config": fact("fsdp_config", "parallelism.zero_stage"),
    **{f"fsdp_config.{prefix}{name}": meaning for prefix in ("", "fsdp_") for name, meaning in _NAMES.items()},
    "fsdp_config.xla*": nothing("for TPUs"),
}

# torch.distributed.fsdp.ShardingStrategy, by name or number.
_STAGES = {
    **dict.fromkeys(("full_shard", "1", "true"), 3),
    **dict.fromkeys(("shard_grad_op", "2", "false"), 2),
    **dict.fromkeys(("no_shard", "3"), 0),
    **dict.fromkeys(("hybrid_shard", "4"), 3),
    **dict.fromkeys(("hybrid_shard_zero2", "5"), 2),
}


def place_fsdp(draft: Draft, words: str) -> int:
    """Set stage, checkpointing and offload from `fsdp` and its block.

    Args:
        draft: the configuration being read; the block is its fact `fsdp_config`.
        words: the value of `fsdp`, for example "full_shard auto_wrap offload".

    Returns:
        The ZeRO stage that shards the same tensors.
    """
    config = draft.facts.get("fsdp_config")
    settings = config if isinstance(config, Mapping) else {}
    if not words.strip() and not settings:
        return 0
    options = [*words.lower().replace(",", " ").split(), *_strategies(settings)]
    strategy = next((word for word in reversed(options) if word in _STAGES), "full_shard")
    stage = _STAGES[strategy]
    if strategy.startswith("hybrid") or strategy in ("4", "5"):
        _place_replicas(draft)
    if stage:
        draft.default("parallelism.zero_stage", stage)
        draft.default("parallelism.engine", "fsdp2")
    if _is_on(settings, "activation_checkpointing"):
        _place_checkpoints(draft, settings)
    if _is_on(settings, "offload_params") or "offload" in options:
        place_shards(draft)
    return stage


def _place_checkpoints(draft: Draft, settings: Mapping[Any, Any]) -> None:
    """Checkpoint every layer that FSDP wraps.

    FSDP1 with SIZE_BASED_WRAP finds no layer: accelerator.py passes that policy to apply_activation_checkpointing,
    which applies it without a size.
    """
    policy = settings.get("fsdp_auto_wrap_policy", settings.get("auto_wrap_policy"))
    if str(policy).upper() == "SIZE_BASED_WRAP" and _version(draft) == 1:
        draft.default("training.recompute", "none")
        draft.notes.append(
            "FSDP1 checkpoints no layer where auto_wrap_policy is SIZE_BASED_WRAP: nothing is recomputed"
        )
        return
    draft.values["training.recompute"] = "full"


def _version(draft: Draft) -> int:
    """Return 1 or 2: the file's FSDP version, else the program's; `accelerate launch` sets FSDP_VERSION to 1."""
    config = draft.facts.get("fsdp_config")
    settings = config if isinstance(config, Mapping) else {}
    requested = settings.get("fsdp_version", settings.get("version", draft.given_fields.get("fsdp_version")))
    if str(requested) in ("1", "2"):
        return int(str(requested))
    if draft.given(FRAMEWORK) == "accelerate":
        return 1
    return 2 if draft.has("transformers", "5.16") else 1


def place_policy(draft: Draft, dtype: str | None) -> str:
    """Set Accelerate's mixed-precision policy, FSDP units, and no_sync until the last micro-batch.

    Accelerate 1.15 utils/dataclasses.py, set_mixed_precision: parameters, reductions and outputs in the step's dtype,
    on weights that train in fp32 (utils/fsdp_utils.py, fsdp2_prepare_model). accelerator.py: prepare_model runs FSDP1
    under autocast, _prepare_fsdp2 does not; no_sync is set_requires_gradient_sync(False).

    Args:
        draft: the configuration being read.
        dtype: dtype of mixed precision; None without it.

    Returns:
        The recipe of the trained parameters; "" without a policy.
    """
    if draft.given("parallelism.engine") != "fsdp2":
        return ""
    version = _version(draft)
    if version == 1:
        # A script builds its optimizer before accelerator.prepare flattens the parameters, so the optimizer references
        # the unsharded parameters until the first step is over.
        script = draft.given(FRAMEWORK) == "accelerate"
        draft.limit("FSDP1", "FSDP2 with its mixed-precision policy is counted", holds_memory=script)
    elif draft.has("accelerate", "1.14"):
        draft.default("parallelism.fsdp.wrap", "layers-and-ends")
    steps = draft.given("training.gradient_accumulation_steps")
    if draft.given("parallelism.offload") in (None, "none"):
        draft.default("parallelism.fsdp.gradient_sync", "last")
    elif type(steps) is int and steps > 1:
        what = "gradients that stay unsharded until the last micro-batch"
        draft.limit(what, "their shards are counted", holds_memory=True)
    masters = str(draft.overridden.get("training.recipe", "")).startswith("mixed")
    if dtype is None or masters:
        return ""
    for role in ("param_dtype", "reduce_dtype", "output_dtype"):
        draft.default(f"parallelism.fsdp.{role}", dtype)
    return "fp32" if version == 2 else "amp"


def _place_replicas(draft: Draft) -> None:
    """Set one replica of the shards per machine, if the file sets the number of machines."""
    machines = draft.facts.get("machines")
    if type(machines) is int and machines > 0:
        draft.default("parallelism.data_parallel_replicate", machines)
    elif "parallelism.data_parallel_replicate" not in draft.values:
        draft.notes.append(
            "FSDP shards within a node, with copies over nodes: set their number with --set data_parallel_replicate="
        )


def _strategies(settings: Mapping[Any, Any]) -> list[str]:
    """Return FSDP 1's strategy and FSDP 2's resharding; the last one takes precedence."""
    names = ("sharding_strategy", "reshard_after_forward")
    found = [settings.get(f"fsdp_{name}", settings.get(name)) for name in names]
    return [str(value).lower() for value in found if value is not None]


def _is_on(settings: Mapping[Any, Any], name: str) -> bool:
    return str(settings.get(f"fsdp_{name}", settings.get(name, False))).lower() == "true"
