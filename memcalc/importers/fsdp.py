"""FSDP's words, as transformers, Accelerate and axolotl have them: what they shard, and what their blocks hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.frameworks.draft import Draft
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
    "mixed_precision_policy": lacking("a precision of FSDP's own", "the step's is counted"),
    "ignored_modules": lacking("modules that are not sharded"),
    **{name: nothing("changes the implementation, not what is saved") for name in _HOW},
}

BLOCK: dict[str, Meaning] = {
    "fsdp_config": fact("fsdp_config", "parallelism.zero_stage"),
    **{f"fsdp_config.{prefix}{name}": meaning for prefix in ("", "fsdp_") for name, meaning in _NAMES.items()},
    "fsdp_config.xla*": nothing("for TPUs"),
}

# torch.distributed.fsdp.ShardingStrategy: words, and numbers where a file has those.
_STAGES = {
    **dict.fromkeys(("full_shard", "1", "true"), 3),
    **dict.fromkeys(("shard_grad_op", "2", "false"), 2),
    **dict.fromkeys(("no_shard", "3"), 0),
    **dict.fromkeys(("hybrid_shard", "4"), 3),
    **dict.fromkeys(("hybrid_shard_zero2", "5"), 2),
}


def place_fsdp(draft: Draft, words: str) -> int:
    """What `fsdp` and its block say: the stage, checkpointing and offload, into the draft.

    Args:
        draft: our configuration in the making; the block is its fact `fsdp_config`.
        words: `fsdp` itself: "full_shard auto_wrap offload".

    Returns:
        ZeRO's stage that shards as much.
    """
    config = draft.facts.get("fsdp_config")
    settings = config if isinstance(config, Mapping) else {}
    if not words.strip() and not settings:
        return 0
    said = [*words.lower().replace(",", " ").split(), *_strategies(settings)]
    strategy = next((word for word in reversed(said) if word in _STAGES), "full_shard")
    stage = _STAGES[strategy]
    if strategy.startswith("hybrid") or strategy in ("4", "5"):
        _place_replicas(draft)
    if stage:
        draft.default("parallelism.zero_stage", stage)
        draft.default("parallelism.engine", "fsdp2")
    steps = draft.given("training.gradient_accumulation_steps")
    if stage and type(steps) is int and steps > 1:  # accelerator.py, no_sync: set_requires_gradient_sync(False)
        what = "gradients that stay whole until the last micro-batch"
        draft.limit(what, "their shards are counted", holds_memory=True)
    if _is_on(settings, "activation_checkpointing"):
        draft.values["training.recompute"] = "full"
    if _is_on(settings, "offload_params") or "offload" in said:
        place_shards(draft)
    return stage


def _place_replicas(draft: Draft) -> None:
    """A copy of the shards on each machine, where the file says how many there are."""
    machines = draft.facts.get("machines")
    if type(machines) is int and machines > 0:
        draft.default("parallelism.data_parallel_replicate", machines)
    elif "parallelism.data_parallel_replicate" not in draft.values:
        draft.notes.append(
            "FSDP shards within a node, with copies over nodes: say how many with --set data_parallel_replicate="
        )


def _strategies(settings: Mapping[Any, Any]) -> list[str]:
    """FSDP 1's strategy and FSDP 2's resharding, the one that decides last."""
    names = ("sharding_strategy", "reshard_after_forward")
    found = [settings.get(f"fsdp_{name}", settings.get(name)) for name in names]
    return [str(value).lower() for value in found if value is not None]


def _is_on(settings: Mapping[Any, Any], name: str) -> bool:
    return str(settings.get(f"fsdp_{name}", settings.get(name, False))).lower() == "true"
