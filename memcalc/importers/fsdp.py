"""FSDP settings in the syntax of transformers, Accelerate and axolotl: sharding, checkpoints, offload, precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.errors import InputError
from memcalc.frameworks.draft import FRAMEWORK, Draft
from memcalc.importers.file_format import Meaning, fact, lacking, nothing, part
from memcalc.importers.offload import place_shards

_HOW = (
    *("final_state_dict_type", "limit_all_gathers", "state_dict_type"),
    *("sync_module_states", "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap"),
    *("cpu_offload_pin_memory",),
)

# transformers 5.23, training_args.py; Accelerate 1.11, utils/dataclasses.py; axolotl 0.18, utils/schemas/fsdp.py: each
# name alone or after "fsdp_".
_NAMES: dict[str, Meaning] = {
    **part("parallelism.zero_stage").at("sharding_strategy reshard_after_forward"),
    "activation_checkpointing": part("training.recompute"),
    "offload_params": part("parallelism.offload"),
    "mixed_precision_policy": lacking("a separate precision of FSDP", "the precision of the step is counted"),
    "ignored_modules": lacking("modules that are not sharded"),
    **part("parallelism.engine").at("version auto_wrap_policy min_num_params"),
    "forward_prefetch": part("parallelism.fsdp.forward_prefetch"),
    **part("parallelism.fsdp.backward_prefetch").at("backward_prefetch backward_prefetch_policy"),
    "use_orig_params": part("parallelism.fsdp.use_orig_params"),
    "cpu_ram_efficient_loading": part("parallelism.fsdp.weights_from"),
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
    draft.facts["fsdp_wraps"] = "auto_wrap" in options
    strategy = next((word for word in reversed(options) if word in _STAGES), "full_shard")
    if _STAGES[strategy] and _ignores_strategy(draft):
        strategy = "full_shard"
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


def _ignores_strategy(draft: Draft) -> bool:
    """Return whether FSDP1 shards everything, whatever strategy a file of Trainer names.

    transformers 5.23 training_args.py, _process_fsdp_args, gives it as reshard_after_forward; Accelerate 1.15
    utils/dataclasses.py, FullyShardedDataParallelPlugin, prefers its own default of sharding_strategy.
    """
    by_trainer = not _is_launched(draft) and draft.given(FRAMEWORK) != "axolotl"
    return by_trainer and fsdp_version(draft) == 1 and draft.has("transformers", "5.4")


def _place_checkpoints(draft: Draft, settings: Mapping[Any, Any]) -> None:
    """Checkpoint every layer that FSDP wraps.

    FSDP1 with SIZE_BASED_WRAP finds no layer: accelerator.py passes that policy to apply_activation_checkpointing,
    which applies it without a size.
    """
    policy = settings.get("fsdp_auto_wrap_policy", settings.get("auto_wrap_policy"))
    if str(policy).upper() == "SIZE_BASED_WRAP" and fsdp_version(draft) == 1:
        draft.default("training.recompute", "none")
        draft.notes.append(
            "FSDP1 checkpoints no layer where auto_wrap_policy is SIZE_BASED_WRAP: nothing is recomputed"
        )
        return
    draft.values["training.recompute"] = "full"


def fsdp_version(draft: Draft) -> int:
    """Return 1 or 2: the file's FSDP version, else the program's; `accelerate launch` sets FSDP_VERSION to 1.

    FSDP1 rejects 4-bit weights that are stored in integers, so if neither is known such a run has FSDP2.
    """
    config = draft.facts.get("fsdp_config")
    settings = config if isinstance(config, Mapping) else {}
    requested = settings.get("fsdp_version", settings.get("version", draft.given_fields.get("fsdp_version")))
    if str(requested) in ("1", "2"):
        return int(str(requested))
    if _is_launched(draft):
        return 1
    guessed = "training.versions.transformers" not in draft.overridden
    if guessed and draft.given("training.qlora.quant_storage") == "uint8":
        return 2
    return 2 if draft.has("transformers", "5.10") else 1


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
    version = fsdp_version(draft)
    if version == 1:
        _place_flat_parameters(draft)
    else:
        if draft.has("accelerate", "1.14"):
            draft.default("parallelism.fsdp.wrap", "layers-and-ends")
        if draft.given("training.finetune") == "qlora":
            draft.default("parallelism.fsdp.keeps_unsharded_weights", True)
        else:
            _place_loading(draft)
    steps = draft.given("training.gradient_accumulation_steps")
    if draft.given("parallelism.offload") in (None, "none"):
        draft.default("parallelism.fsdp.gradient_sync", "last")
    elif type(steps) is int and steps > 1:
        what = "gradients that stay unsharded until the last micro-batch"
        draft.limit(what, "their shards are counted", holds_memory=True)
    masters = str(draft.overridden.get("training.recipe", "")).startswith("mixed")
    if dtype is None or masters:
        return ""
    roles = ("param_dtype", "reduce_dtype", "output_dtype")
    for role in roles[:2] if draft.given("parallelism.engine") == "fsdp1" else roles:
        draft.default(f"parallelism.fsdp.{role}", dtype)
    return "fp32" if version == 2 else "amp"


def _place_loading(draft: Draft) -> None:
    """Set how weights get to the GPU under FSDP2, where that is modelled.

    Defaults: Accelerate 1.15 commands/launch.py, true; transformers 5.23 training_args.py, _process_fsdp_args, false.
    """
    degrees = ("tensor_parallel", "pipeline_parallel")
    if any(draft.given(f"parallelism.{each}") not in (None, 1) for each in degrees):
        return
    if draft.given("parallelism.offload") not in (None, "none"):
        return
    config = draft.facts.get("fsdp_config")
    settings = config if isinstance(config, Mapping) else {}
    broadcasts = str(_setting(settings, "cpu_ram_efficient_loading", _is_launched(draft))).lower() == "true"
    draft.default("parallelism.fsdp.weights_from", "first-rank" if broadcasts else "host")


def _place_flat_parameters(draft: Draft) -> None:
    """Set FSDP1, its flat parameters and its prefetch; FSDP2 with a limit if FSDP1's units are not modelled.

    Defaults are NO_PREFETCH and original parameters: Accelerate 1.15 commands/launch.py and utils/dataclasses.py;
    transformers 5.23 training_args.py, _process_fsdp_args.

    Raises:
        InputError: FSDP1 rejects the dtype in which 4-bit weights are stored (torch 2.13 distributed/fsdp/
            _flat_param.py, _validate_tensors_to_flatten).
    """
    if draft.given("training.qlora.quant_storage") == "uint8":
        raise InputError(
            "FSDP1 cannot flatten 4-bit weights that are stored in integers (uint8), so this run ends with an error.",
            "Set bnb_4bit_quant_storage: bfloat16, or fsdp_version: 2.",
        )
    config = draft.facts.get("fsdp_config")
    settings = config if isinstance(config, Mapping) else {}
    if (reason := _lacks(draft)) or "parallelism.engine" in draft.overridden:
        if reason:
            what = f"FSDP1 with {reason}"
            draft.limit(what, "FSDP2 with its mixed-precision policy is counted", holds_memory=True)
        return
    draft.values["parallelism.engine"] = "fsdp1"
    script = draft.given(FRAMEWORK) == "accelerate"
    names = ("backward_prefetch", "backward_prefetch_policy")
    prefetch = next((str(each).upper() for name in names if (each := _setting(settings, name)) is not None), "")
    # FullyShardedDataParallelPlugin: the name of the policy, or its number in torch.distributed.fsdp.BackwardPrefetch
    known = {"BACKWARD_PRE": "pre", "1": "pre", "BACKWARD_POST": "post", "2": "post"}
    draft.default("parallelism.fsdp.backward_prefetch", known.get(prefetch, "none"))
    draft.default("parallelism.fsdp.forward_prefetch", _is_on(settings, "forward_prefetch"))
    original = str(_setting(settings, "use_orig_params", "true")).lower() == "true"
    draft.default("parallelism.fsdp.use_orig_params", original)
    _place_units(draft, settings)
    if _has_adapters(draft):  # trainer.py, _prepare_for_training: PEFT's policy
        draft.default("parallelism.fsdp.wrap", "layers-and-trained")
        if draft.given("training.finetune") == "qlora":  # a unit of several dtypes is an error
            draft.default("training.lora.base_dtype", "compute")
    if script and not draft.given("parallelism.fsdp.use_orig_params"):
        # accelerate 1.15 accelerator.py, prepare: the parameters of an existing optimizer are not replaced, so its
        # zero_grad does not free the gradients of the shards.
        draft.default("training.zero_grad", "zero")
        what = "whole parameters that the optimizer keeps if the script builds it before accelerator.prepare"
        remedy = "build it afterwards, or set fsdp_use_orig_params: true"
        draft.limit(what, f"not counted; no step updates the shards then, so {remedy}", holds_memory=True)


def _place_units(draft: Draft, settings: Mapping[Any, Any]) -> None:
    """Set units by size, or the model as one unit, where layers are no units.

    Accelerate 1.15 commands/launch.py, fsdp_min_num_params: 1e8 by default. torch 2.13 distributed/fsdp/wrap.py,
    size_based_auto_wrap_policy: parts of layers may be units, too, and so may be all layers together.
    """
    policy = str(_setting(settings, "auto_wrap_policy", "")).upper()
    least = _setting(settings, "min_num_params", 0)
    by_size = not _is_launched(draft) and not policy and str(least) not in ("0", "None")
    if by_size or policy == "SIZE_BASED_WRAP":
        draft.default("parallelism.fsdp.wrap", "size")
        if type(least) is int and least > 0:
            draft.default("parallelism.fsdp.least_unit_parameters", least)
        what = "layers are counted, or if they are smaller the model as one unit"
        draft.limit("FSDP1 with units by size", what, holds_memory=True)
    elif policy == "NO_WRAP" or not (policy or _wraps_layers(draft)):
        draft.default("parallelism.fsdp.wrap", "model")


def _lacks(draft: Draft) -> str:
    """Return what the file sets that the engine of FSDP1 does not model; "" if nothing."""
    script = draft.given(FRAMEWORK) == "accelerate"
    masters = str(draft.overridden.get("training.recipe", "")).startswith("mixed")
    degrees = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
    reasons = {
        "adapters in units with frozen weights": script and _has_adapters(draft),
        "parameters in host memory": draft.given("parallelism.offload") not in (None, "none"),
        "FP8": draft.facts.get("precision") == "fp8" or draft.given("training.fp8") not in (None, "none"),
        "weight averages": draft.given("training.ema") not in (None, "none"),
        "master weights": masters,
        "other parallelism": any(draft.given(f"parallelism.{each}") not in (None, 1) for each in degrees),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


def _is_launched(draft: Draft) -> bool:
    """Return whether `accelerate launch` sets FSDP, by the environment; `kind` is distributed_type of its file."""
    return draft.given(FRAMEWORK) == "accelerate" or "kind" in draft.facts


def _has_adapters(draft: Draft) -> bool:
    return draft.given("training.finetune") in ("lora", "qlora")


def _wraps_layers(draft: Draft) -> bool:
    """Return whether layers are units although the file names no policy.

    transformers training_args.py: before 5.10 with the word auto_wrap in `fsdp`, from then on by default. Accelerate
    1.15 utils/dataclasses.py: NO_WRAP.
    """
    if _is_launched(draft):
        return False
    return bool(draft.facts.get("fsdp_wraps")) or draft.has("transformers", "5.10")


def _setting(settings: Mapping[Any, Any], name: str, default: Any = None) -> Any:
    found = settings.get(f"fsdp_{name}", settings.get(name))
    return default if found is None else found


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
