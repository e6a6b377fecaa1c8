"""DeepSpeed's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.frameworks.deepspeed import place_copies, place_own_adam, place_zero
from memcalc.frameworks.draft import Draft
from memcalc.frameworks.lengths import place_lengths
from memcalc.frameworks.scripts import place_outputs
from memcalc.importers.file_format import (
    BATCH,
    GPUS,
    LENGTH,
    FileFormat,
    Meaning,
    fact,
    lacking,
    nothing,
    overcounted,
    part,
    to,
)
from memcalc.importers.offload import place_optimizer

_HOW = (  # DeepSpeed's words for the way in which ZeRO works
    "allgather_partitions",
    "contiguous_gradients",
    "cpu_offload_use_pin_memory",
    "elastic_checkpoint",
    "enable_sanity_checks",
    "gather_16bit_weights_on_model_save",
    "ignore_unused_parameters",
    "legacy_stage1",
    "load_from_fp32_weights",
    "log_trace_cache_warnings",
    "max_reuse_distance",
    "override_module_apply",
    "pipeline_loading_checkpoint",
    "reduce_scatter",
    "round_robin_gradients",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "stage3_max_reuse_distance",
    "sub_group_size",
    "use_all_reduce_for_fetch_params",
    "use_multi_rank_bucket_allreduce",
)

OPTIMIZERS = {
    "adamw": "adamw",
    "adam": "adam",
    "lion": "lion",
    "sgd": "sgd",
    "adagrad": "adagrad",
    "muon": "muon",
    "fusedadam": "adam",
    "cpuadam": "adam",
    "onebitadam": "adam",
    "zerooneadam": "adam",
    "lamb": "lamb",
    "onebitlamb": "lamb",
}
_DEFAULT = "the default is counted"
# Optimizers with compressed communication: bytes of fp32 state per parameter from the first steps on, in addition to
# Adam's two moments. runtime/fp16/onebit/zoadam.py: worker_error, momentum_accumulator; lamb.py: worker_errors,
# exp_avg_sq_fresh. Each has a server_error of a rank's part in addition. adam.py: worker_error after freeze_step steps,
# perhaps never.
_COMPRESSED = {"onebitadam": 0, "zerooneadam": 8, "onebitlamb": 8}


def _optimizer(draft: Draft, value: Any) -> None:
    draft.translate("training.optimizer", value, OPTIMIZERS)
    if str(value).lower() in _COMPRESSED:
        size = _COMPRESSED[str(value).lower()]
        why = f"{size} bytes per parameter" if size else "4 bytes per parameter after freeze_step steps"
        what = f"the compression errors of {value}"
        draft.limit(what, why, holds_memory=True, state_bytes_per_parameter=size)


# DeepSpeed 0.17, deepspeed/runtime/config.py, zero/config.py.
FIELDS: dict[str, Meaning] = {
    "train_batch_size": to("training.global_batch_size"),
    "train_micro_batch_size_per_gpu": to("training.micro_batch_size"),
    "gradient_accumulation_steps": to("training.gradient_accumulation_steps"),
    "zero_optimization.stage": to("parallelism.zero_stage"),
    **fact("bf16", "training.dtype: precision of the step", reads_auto=True).at("bf16.enabled bfloat16.enabled"),
    "fp16.enabled": fact("fp16", "training.dtype: precision of the step", reads_auto=True),
    "optimizer.type": Meaning("mapped", "training.optimizer", _optimizer),
    "zero_optimization.offload_optimizer.device": fact("offload", "parallelism.offload"),
    "zero_optimization.cpu_offload": fact("cpu_offload", "parallelism.offload"),
    "zero_optimization.offload_param.device": fact("offload_param", "parallelism.offload"),
    "zero_optimization.cpu_offload_param": fact("cpu_offload_param", "parallelism.offload"),
    "zero_optimization.offload_optimizer.ratio": lacking(
        "optimizer states that stay on the device", "all are counted in host memory", known=(1, 1.0)
    ),
    "zero_optimization.offload_optimizer.super_offload": lacking("SuperOffload's updates on the device"),
    **nothing("part of the offload").at("zero_optimization.offload_optimizer* zero_optimization.offload_param* aio*"),
    "zero_optimization.zenflow*": lacking("ZenFlow's updates on the device"),
    "zero_optimization.reduce_bucket_size": part("parallelism.zero_optimization.reduce_bucket_size"),
    "zero_optimization.overlap_comm": part("parallelism.zero_optimization.overlap_comm"),
    # runtime/utils.py, all_gather_into_tensor_dp_groups: into the flat weights, whatever the size.
    "zero_optimization.allgather_bucket_size": nothing("updated weights are gathered in place"),
    **{
        f"zero_optimization.{prefix}{name}": meaning
        for prefix in ("", "stage3_")
        for name, meaning in (
            ("prefetch_bucket_size", part("parallelism.zero_optimization.prefetch_bucket_size")),
            ("max_live_parameters", lacking("gathered weights that are kept", _DEFAULT, beyond=1_000_000_000)),
            ("param_persistence_threshold", part("parallelism.zero_optimization.param_persistence_threshold")),
            (
                "model_persistence_threshold",
                overcounted("all", "small weights that stay unsharded", "without an upper bound"),
            ),
        )
    },
    "zero_optimization.mics*": lacking("shards within a group of ranks"),
    "zero_optimization.zero_hpz_partition_size": lacking("a second copy of the shards within a node"),
    "zero_optimization.zero_quantized*": lacking("quantized communication"),
    **{f"zero_optimization.{name}": nothing("changes the implementation, not what is saved") for name in _HOW},
    "activation_checkpointing.partition_activations": overcounted(
        "activations", "checkpoints that are split over tensor-parallel ranks"
    ),
    "activation_checkpointing.cpu_checkpointing": overcounted("activations", "checkpoints offloaded to the CPU"),
    "activation_checkpointing*": nothing("the program sets what it checkpoints"),
    **{
        f"{precision}.{name}": overcounted("states", "16-bit master weights, gradients or states")
        for precision in ("bf16", "bfloat16", "fp16")
        for name in (
            f"{precision}_master_weights_and_grads",
            "bf16_optimizer_states",
            "fp16_master_weights_and_gradients",
        )
    },
    "torch_autocast.enabled": lacking("autocast over fp32 weights"),
    "torch_autocast*": nothing("part of torch_autocast"),
    "data_types.grad_accum_dtype": to(
        "training.gradient_dtype", {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "fp16": "fp16"}
    ),
    "bf16*": nothing("changes the implementation only"),
    "fp16*": nothing("loss scaling"),
    "amp*": lacking("NVIDIA's Apex", overcounts="states"),
    **nothing().at(
        "optimizer* scheduler* zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients",
        "elasticity* train_steps _comment",
    ),
    "gradient_clipping": nothing("gradient clipping is not estimated"),
    **nothing("logging").at(
        "steps_per_print wall_clock_breakdown tensorboard* wandb* csv_monitor* comms_logger* flops_profiler*",
        "dump_state monitor_config*",
    ),
    **nothing("the default is counted").at("communication_data_type seq_parallel_communication_data_type"),
    "checkpoint*": nothing("saving"),
    "data_efficiency*": nothing("data"),
    "compile.deepcompile": lacking("DeepSpeed's compiler"),
    "compile*": nothing("what engine.compile() does, if the program calls it"),
    "tensor_parallel*": lacking("DeepSpeed's tensor parallelism", overcounts="all"),
    "autotuning*": nothing("a search, not a run"),
}


# The same inside another framework's file, which sets precision, batch and optimizer in its own fields.
AS_PARTS = {path: part(meaning.meaning) if meaning.kind == "mapped" else meaning for path, meaning in FIELDS.items()}


def finish_deepspeed(draft: Draft) -> None:
    """Precision: DeepSpeed keeps fp32 copies that the optimizer updates, in addition to 16-bit weights."""
    half = "bf16" if draft.facts.get("bf16") is True else "fp16" if draft.facts.get("fp16") is True else None
    if half is None and "auto" in (draft.facts.get("bf16"), draft.facts.get("fp16")):
        _ask_precision(draft)
    else:
        draft.default("training.dtype", half or "fp32")
        draft.default("training.recipe", "fp32" if half is None else "mixed-16")
    draft.default("parallelism.zero_stage", 0)
    draft.default("parallelism.engine", "deepspeed")
    draft.default("training.implementation", "huggingface")
    place_outputs(draft)
    place_lengths(draft)
    beginning = "zero_optimization."
    place_zero(
        draft,
        {key.removeprefix(beginning): each for key, each in draft.given_fields.items() if key.startswith(beginning)},
    )
    place_copies(draft)
    _place_sums(draft)
    fields = draft.given_fields
    params = {"torch_adam": fields.get("optimizer.params.torch_adam")}
    optimizer = {"type": fields.get("optimizer.type"), "params": params}
    place_own_adam(draft, optimizer, draft.given("parallelism.zero_stage"))
    if "training.optimizer" not in draft.values.keys() | draft.overridden.keys():
        draft.notes.append("no optimizer in the DeepSpeed config; assuming adamw. Change it with --set optimizer=")
    micro = "training.micro_batch_size" in draft.values.keys() | draft.overridden.keys()
    if "training.global_batch_size" in draft.values and not micro:
        draft.default("training.gradient_accumulation_steps", 1)  # runtime/config.py, _set_batch_related_parameters
    place_optimizer(draft, _place(draft, "offload", "cpu_offload"), _place(draft, "offload_param", "cpu_offload_param"))


def _place_sums(draft: Draft) -> None:
    """Set where gradients of 16-bit weights are summed: in fp32, if data_types.grad_accum_dtype says so, or elsewhere.

    runtime/engine.py, _do_optimizer_sanity_check: BF16_Optimizer runs at stage 1 with fp32 sums, and without ZeRO in
    the pipeline engine, with sums in bf16. Stages 2 and 3 have fp32 sums of the rank's shards.
    """
    stage, half = draft.given("parallelism.zero_stage"), draft.given("training.dtype")
    offloads = draft.facts.get("offload") or draft.facts.get("cpu_offload")
    pipelined = draft.facts.get("pipelined") or draft.given("parallelism.pipeline_parallel") not in (None, 1)
    in_fp32 = half in ("bf16", "fp16") and draft.given("training.gradient_dtype") == "fp32"
    if half == "bf16" and ((stage == 1 and in_fp32 and not offloads) or (stage == 0 and pipelined)):
        draft.values["training.recipe"] = "mixed-20"
        draft.values["parallelism.zero_stage"] = 1
        draft.default("training.gradient_dtype", "bf16")
    elif in_fp32 and stage in (2, 3):
        draft.values["training.recipe"] = "mixed-20"
    elif in_fp32:
        what = "gradients of 16-bit weights summed in fp32"
        draft.limit(what, "they are summed in the weights' dtype", holds_memory=True)


def _ask_precision(draft: Draft) -> None:
    """`auto` is what the Trainer around it says, which is not in the file."""
    if "training.dtype" in draft.overridden:
        draft.default("training.recipe", "mixed-16")
    elif "training.recipe" not in draft.overridden:
        draft.elsewhere.append(("bf16.enabled and fp16.enabled", ("training.dtype",)))


def _place(draft: Draft, device: str, older: str) -> object:
    """Where something is offloaded to, by its block or by the word of former releases."""
    return draft.facts.get(device) or ("cpu" if draft.facts.get(older) is True else None)


def _recognized(data: Mapping[str, Any]) -> bool:
    return any(key in data for key in ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"))


DEEPSPEED = FileFormat(
    "DeepSpeed",
    "0.17",
    FIELDS,
    finish_deepspeed,
    _recognized,
    (GPUS, BATCH, LENGTH),
    framework="deepspeed",
)
