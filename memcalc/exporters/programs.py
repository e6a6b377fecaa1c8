"""The fields of a run that each program's own file can contain, in that program's syntax.

A file holds what its reader in `memcalc/importers` maps, which names the sources; whatever a file lacks, or its program
means otherwise, is completed by settings (`completing.py`). So nothing here need be whole, and nothing may be wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import yaml

from memcalc.spec.spec import Spec

Block = dict[str, Any]
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
DEGREES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")


class ExportTarget(NamedTuple):
    """A program that files can be written for."""

    label: str  # its name in messages
    suffixes: tuple[str, ...]  # of its files; the first is suggested
    engines: tuple[str, ...]  # the sharding engines that it runs
    degrees: tuple[str, ...]  # kinds of parallelism besides data that it has
    # the file of a run: the run, and the name or hub id of its model, if it has one
    text: Callable[[Spec, str | None], str]

    def refusal(self, spec: Spec) -> str:
        """Why the program cannot run it, as a sentence; "" if it can."""
        if spec.inference is not None:
            return f"a file of {self.label} describes training, and this is generation."
        if spec.parallelism.engine not in self.engines:
            return f"{self.label} does not shard as engine = {spec.parallelism.engine} does."
        held = () if spec.parallelism.engine == "deepspeed" else self.degrees  # no program splits layers below ZeRO
        for degree in DEGREES:
            if (value := getattr(spec.parallelism, degree)) > 1 and degree not in held:
                return f"{self.label} has no {degree} = {value} with engine = {spec.parallelism.engine}."
        return ""


def _accelerate(spec: Spec, _: str | None) -> str:
    """`accelerate launch --config_file FILE`."""
    parallelism, training = spec.parallelism, spec.training
    block: Block = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": {"fsdp1": "FSDP", "fsdp2": "FSDP", "deepspeed": "DEEPSPEED"}.get(
            _sharding_engine(spec), "MULTI_GPU" if parallelism.ranks > 1 else "NO"
        ),
        "mixed_precision": "no" if training.dtype == "fp32" else training.dtype,
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": parallelism.ranks,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
    }
    if block["distributed_type"] == "FSDP":
        block["fsdp_config"] = {
            "fsdp_version": _fsdp_version(spec),
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            **_fsdp(spec, "fsdp_"),
        }
    if parallelism.tensor_parallel * parallelism.context_parallel > 1:
        sizes = {
            "dp_replicate": parallelism.data_parallel_replicate,
            "dp_shard": parallelism.data_parallel // parallelism.data_parallel_replicate,
            "tp": parallelism.tensor_parallel,
            "cp": parallelism.context_parallel,
        }
        block["parallelism_config"] = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    if block["distributed_type"] == "DEEPSPEED":
        device = {"optimizer": ("cpu", "none"), "all": ("cpu", "cpu")}.get(parallelism.offload, ("none", "none"))
        block["deepspeed_config"] = {
            "zero_stage": parallelism.zero_stage,
            "gradient_accumulation_steps": training.gradient_accumulation_steps,
            "offload_optimizer_device": device[0],
            "offload_param_device": device[1],
        }
    return _yaml(block)


def _deepspeed(spec: Spec, _: str | None) -> str:
    """DeepSpeed's own JSON."""
    return json.dumps(_deepspeed_block(spec), indent=2) + "\n"


def _deepspeed_block(spec: Spec) -> Block:
    training, parallelism = spec.training, spec.parallelism
    zero: Block = {"stage": parallelism.zero_stage}
    for name, kinds in (("offload_optimizer", ("optimizer", "all")), ("offload_param", ("all",))):
        if parallelism.offload in kinds:
            zero[name] = {"device": "cpu", "pin_memory": parallelism.offload_pin_memory}
    block: Block = {
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "zero_optimization": zero,
    }
    if training.dtype != "fp32":
        block[training.dtype] = {"enabled": True}
        if training.recipe == "mixed-20" and (parallelism.zero_stage > 1 or parallelism.offload == "none"):
            block["data_types"] = {"grad_accum_dtype": "fp32"}
    if training.gradient_clipping is not None:
        block["gradient_clipping"] = training.gradient_clipping
    if training.optimizer in ("adamw", "adam", "sgd", "lion"):
        names = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "lion": "Lion"}
        block["optimizer"] = {"type": names[training.optimizer], "params": {}}
    return block


def _torchtitan(spec: Spec, model: str | None) -> str:
    """torchtitan's TOML, of the releases with `[training] local_batch_size`."""
    training, parallelism = spec.training, spec.parallelism
    recompute = {"none": "none", "full": "full"}.get(str(training.recompute))
    every = str(training.recompute).removeprefix("every-")
    checkpoints: Block = {"mode": recompute} if recompute else {}
    if not checkpoints and every.isdecimal():
        checkpoints = {"mode": "selective", "selective_ac_option": every}
    elif training.recompute == "selective":
        checkpoints = {"mode": "selective", "selective_ac_option": "op"}
    replicas = parallelism.data_parallel if parallelism.engine == "ddp" else parallelism.data_parallel_replicate
    family = {"llama": "llama3"}.get(spec.model.architecture or "", spec.model.architecture or "model")
    sections: dict[str, Block] = {
        "model": {"name": family, "flavor": _flavor(model or spec.name)},
        "training": {
            "local_batch_size": training.micro_batch_size,
            "global_batch_size": training.micro_batch_size
            * training.gradient_accumulation_steps
            * parallelism.data_parallel,
            "seq_len": training.sequence_length,
            "mixed_precision_param": _DTYPES[training.dtype],
        },
        "parallelism": {
            "data_parallel_replicate_degree": replicas,
            "data_parallel_shard_degree": parallelism.data_parallel // replicas,
            "tensor_parallel_degree": parallelism.tensor_parallel,
            "pipeline_parallel_degree": parallelism.pipeline_parallel,
            "context_parallel_degree": parallelism.context_parallel,
            "expert_parallel_degree": parallelism.expert_parallel,
        },
        "activation_checkpoint": checkpoints,
        "optimizer": {"implementation": training.optimizer_implementation},
    }
    if parallelism.pipeline_parallel > 1:
        sections["training"]["local_batch_size"] = training.micro_batch_size * training.gradient_accumulation_steps
        sections["parallelism"] |= _titan_stages(spec)
    if training.optimizer in ("adamw", "adam"):
        sections["optimizer"]["name"] = {"adamw": "AdamW", "adam": "Adam"}[training.optimizer]
    lines = []
    for name, fields in sections.items():
        if fields:
            lines += [f"[{name}]", *(f"{field} = {json.dumps(value)}" for field, value in fields.items()), ""]
    return "\n".join(lines)


_TITAN_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}


def _titan_stages(spec: Spec) -> Block:
    """Return torchtitan's keys of a pipeline: its schedule, its micro-batch, and whether the ends count as layers."""
    parallelism, schedule = spec.parallelism, _TITAN_SCHEDULES.get(spec.parallelism.schedule)
    less = 1 if parallelism.pipeline_split == "layers-and-ends" else 0
    return {
        **({} if schedule is None else {"pipeline_parallel_schedule": schedule}),
        "pipeline_parallel_microbatch_size": spec.training.micro_batch_size,
        "pipeline_parallel_first_stage_less_layers": less,
        "pipeline_parallel_last_stage_less_layers": less,
    }


def _flavor(name: str) -> str:
    """How torchtitan calls the sizes of a model: "8B" of llama-3-8b."""
    size = re.search(r"(?<![\d.])\d+(?:\.\d+)?b\b", name, re.IGNORECASE)
    return size[0].upper() if size else name


def _megatron(spec: Spec, _: str | None) -> str:
    """Return a script that starts Megatron-LM's pretrain_gpt.py under torchrun, on nodes of at most eight GPUs."""
    ranks = spec.parallelism.ranks
    node = next(size for size in (8, 4, 2, 1) if ranks % size == 0)
    words = [f"torchrun --nproc-per-node {node} --nnodes {ranks // node} pretrain_gpt.py"]
    for name, value in (_megatron_model(spec) | _megatron_run(spec)).items():
        if value is not False:
            words.append(f"--{name}" if value is True else f"--{name} {value}")
    return "#!/bin/bash\n" + " \\\n  ".join(words) + "\n"


def _megatron_model(spec: Spec) -> Block:
    model = spec.model
    grouped = model.num_key_value_heads != model.num_attention_heads
    positions = {"rope": "rope", "learned": "learned_absolute"}.get(model.position_embedding, "none")
    found: Block = {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.intermediate_size,
        "num-attention-heads": model.num_attention_heads,
        "group-query-attention": grouped,
        "num-query-groups": model.num_key_value_heads if grouped else False,
        "kv-channels": model.head_dim,
        "max-position-embeddings": model.max_position_embeddings,
        "padded-vocab-size": model.vocab_size,
        "position-embedding-type": positions,
        "normalization": {"rmsnorm": "RMSNorm"}.get(model.normalization, "LayerNorm"),
        "swiglu": model.mlp == "swiglu",
        "disable-bias-linear": not (model.mlp_bias or model.output_bias),
        "untie-embeddings-and-output-weights": not model.tie_word_embeddings,
        "qk-layernorm": model.qk_norm,
    }
    if model.moe is not None:
        found |= {
            "num-experts": model.moe.num_experts,
            "moe-router-topk": model.moe.num_experts_per_token,
            "moe-ffn-hidden-size": model.moe.expert_intermediate_size,
        }
    return found


def _megatron_run(spec: Spec) -> Block:
    training, parallelism, model = spec.training, spec.parallelism, spec.model
    sequences = training.micro_batch_size * training.gradient_accumulation_steps * parallelism.data_parallel
    recompute: Block = {"recompute-granularity": "selective"} if training.recompute == "selective" else {}
    if training.recompute == "full":
        recompute = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    return {
        "seq-length": training.sequence_length,
        "micro-batch-size": training.micro_batch_size,
        "global-batch-size": sequences,
        "bf16": training.dtype == "bf16",
        "fp16": training.dtype == "fp16",
        "attention-dropout": model.attention_dropout if training.dropout is None else training.dropout,
        "hidden-dropout": model.residual_dropout if training.dropout is None else training.dropout,
        "tensor-model-parallel-size": parallelism.tensor_parallel,
        "pipeline-model-parallel-size": parallelism.pipeline_parallel,
        "context-parallel-size": parallelism.context_parallel,
        "expert-model-parallel-size": parallelism.expert_parallel,
        "sequence-parallel": parallelism.sequence_parallel,
        "use-distributed-optimizer": parallelism.zero_stage == 1,
        **recompute,
    }


def _axolotl(spec: Spec, model: str | None) -> str:
    """axolotl's YAML."""
    training, parallelism = spec.training, spec.parallelism
    block: Block = {
        "base_model": model or spec.name,
        "micro_batch_size": training.micro_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "sequence_len": training.sequence_length,
        "gradient_checkpointing": training.recompute == "full",
        "optimizer": _trainer_optimizer(spec),
        "bf16": training.dtype == "bf16",
        "fp16": training.dtype == "fp16",
        "max_grad_norm": training.gradient_clipping or 0.0,
        "datasets": [],
    }
    if training.lora is not None:
        targets = training.lora.target_modules
        linear = targets == "all-linear"
        block |= {
            "adapter": training.finetune,
            "load_in_4bit": training.finetune == "qlora",
            "lora_r": training.lora.rank,
            "lora_alpha": training.lora.alpha,
            **({"lora_target_linear": True} if linear else {"lora_target_modules": list(targets)}),
        }
    if parallelism.tensor_parallel > 1:
        block["tensor_parallel_size"] = parallelism.tensor_parallel
    if parallelism.context_parallel > 1:
        block["context_parallel_size"] = parallelism.context_parallel
    return _yaml(block | _trainer_sharding(spec, "fsdp_version"))


def _trainer(spec: Spec, model: str | None) -> str:
    """Arguments of transformers' Trainer, as its scripts read them from a file."""
    training = spec.training
    pure = training.recipe == "pure" and training.finetune == "full"
    block: Block = {} if model is None or "/" not in model else {"model_name_or_path": model}
    block |= {
        "per_device_train_batch_size": training.micro_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "gradient_checkpointing": training.recompute == "full",
        "optim": _trainer_optimizer(spec),
        "bf16": training.dtype == "bf16" and not pure,
        "fp16": training.dtype == "fp16" and not pure,
        "max_grad_norm": training.gradient_clipping or 0.0,
    }
    if training.finetune == "full":  # weights are loaded in this dtype; autocast is used in addition
        block["dtype"] = _DTYPES[training.dtype] if pure else "float32"
    return _yaml(block | _trainer_sharding(spec, None))


def _trainer_optimizer(spec: Spec) -> str:
    training = spec.training
    if training.optimizer == "adamw":
        paged = "paged_adamw_32bit" if training.optimizer_options.paged else None
        return paged or ("adamw_torch_fused" if training.optimizer_implementation == "fused" else "adamw_torch")
    if training.optimizer == "adam-8bit":
        return "paged_adamw_8bit" if training.optimizer_options.paged else "adamw_bnb_8bit"
    return {"adafactor-hf": "adafactor", "lion": "lion_32bit", "lion-8bit": "lion_8bit"}.get(
        training.optimizer, training.optimizer if training.optimizer in ("sgd", "adagrad", "rmsprop") else "adamw_torch"
    )


def _trainer_sharding(spec: Spec, version: str | None) -> Block:
    """FSDP's or DeepSpeed's words in the Trainer's arguments."""
    engine = _sharding_engine(spec)
    if engine in ("fsdp1", "fsdp2"):
        first: Block = {"fsdp": "full_shard auto_wrap"} if version is None else {version: _fsdp_version(spec)}
        return first | {"fsdp_config": _fsdp(spec, "")}
    return {"deepspeed": _deepspeed_block(spec)} if engine == "deepspeed" else {}


def _fsdp(spec: Spec, prefix: str) -> Block:
    parallelism = spec.parallelism
    settings: Block = {
        "reshard_after_forward": parallelism.zero_stage == 3,
        "offload_params": parallelism.offload == "all",
    }
    if parallelism.engine == "fsdp1":
        prefetch = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST"}.get(parallelism.fsdp.backward_prefetch)
        settings = {
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": "FULL_SHARD" if parallelism.zero_stage == 3 else "SHARD_GRAD_OP",
            "backward_prefetch": prefetch or "NO_PREFETCH",
            "forward_prefetch": parallelism.fsdp.forward_prefetch,
            "use_orig_params": parallelism.fsdp.use_orig_params,
        } | ({} if prefix else {"version": 1})
    return {f"{prefix}{name}": value for name, value in settings.items()}


def _fsdp_version(spec: Spec) -> int:
    return 1 if spec.parallelism.engine == "fsdp1" else 2


def _sharding_engine(spec: Spec) -> str:
    """Return the engine that shards a run; "": none."""
    return spec.parallelism.engine if spec.parallelism.zero_stage else ""


def _yaml(block: Block) -> str:
    return yaml.safe_dump(block, sort_keys=False, allow_unicode=True)


_YAML = (".yaml", ".yml")
_TRAINER = ("ddp", "fsdp1", "fsdp2", "deepspeed")
_TP_CP = ("tensor_parallel", "context_parallel")
PROGRAMS = {
    "accelerate": ExportTarget("Accelerate", _YAML, _TRAINER, _TP_CP, _accelerate),
    "deepspeed": ExportTarget("DeepSpeed", (".json",), ("ddp", "deepspeed"), (), _deepspeed),
    "torchtitan": ExportTarget("torchtitan", (".toml",), ("ddp", "fsdp2"), DEGREES, _torchtitan),
    "megatron": ExportTarget("Megatron-LM", (".sh",), ("ddp", "megatron"), DEGREES, _megatron),
    "axolotl": ExportTarget("axolotl", _YAML, _TRAINER, _TP_CP, _axolotl),
    "trainer": ExportTarget("transformers' Trainer", _YAML, _TRAINER, (), _trainer),
}
