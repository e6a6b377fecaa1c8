"""torchtitan's TOML."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from memcalc.catalogue.shipped import find_shipped
from memcalc.frameworks.allocator_settings import EXPANDABLE, place_allocator_settings
from memcalc.frameworks.context_parallel import place_rotation
from memcalc.frameworks.draft import Draft
from memcalc.importers import float8
from memcalc.importers.file_format import COMPILE, GPUS, FileFormat, Meaning, fact, lacking, nothing, overcounted, to
from memcalc.importers.models import preset_of
from memcalc.importers.offload import place_shards

# torchtitan 0.2, torchtitan/config/job_config.py.
FIELDS: dict[str, Meaning] = {
    "model.name": fact("name", "model"),
    "model.flavor": fact("flavor", "model"),
    "model.converters": fact("converters", "training.fp8"),
    **to("training.micro_batch_size").at("training.batch_size training.local_batch_size"),
    "training.global_batch_size": fact("global", "training.global_batch_size"),
    "training.seq_len": to("training.sequence_length"),
    "training.mixed_precision_param": fact("param", "training.dtype: precision of the step"),
    "training.mixed_precision_reduce": fact("reduce", "parallelism.fsdp: dtype of reductions"),
    "training.compile": COMPILE,
    "compile.enable": COMPILE,
    "compile*": nothing("part of torch.compile"),
    "training.enable_cpu_offload": fact("offload", "parallelism.offload"),
    "training.dtype": fact("weights", "training.recipe: precision of weights and states"),
    "training.img_size": lacking("a diffusion model"),
    "training.classifier_free_guidance_prob": nothing("part of a diffusion model"),
    **{
        f"training.{name}": nothing()
        for name in (
            *("dataset*", "dataloader*", "steps", "max_norm", "gc_*", "warmup_steps", "deterministic", "seed"),
            *("fused_optimizer", "enable_optimizer_in_backward*", "data_parallel_*", "tensor_parallel_degree"),
        )
    },
    "optimizer.name": to("training.optimizer", {"adamw": "adamw", "adam": "adam"}),
    "optimizer.implementation": to(
        "training.optimizer_implementation", {"fused": "fused", "foreach": "foreach", "for-loop": "for-loop"}
    ),
    "optimizer.early_step_in_backward": overcounted("states", "an optimizer step within backward"),
    **nothing().at(
        "optimizer.lr optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.weight_decay job* lr_scheduler* comm*",
        "experimental* fault_tolerance* debug*",
    ),
    "parallelism.data_parallel_shard_degree": fact("shards", "parallelism.data_parallel"),
    "parallelism.data_parallel_replicate_degree": fact("replicas", "parallelism.data_parallel_replicate"),
    "parallelism.fsdp_reshard_after_forward": fact("reshard", "parallelism.zero_stage"),
    "parallelism.tensor_parallel_degree": to("parallelism.tensor_parallel"),
    "parallelism.pipeline_parallel_degree": to("parallelism.pipeline_parallel"),
    "parallelism.context_parallel_degree": to("parallelism.context_parallel"),
    "parallelism.context_parallel_rotate_method": fact("rotation", "parallelism.context_parallel_method"),
    "parallelism.expert_parallel_degree": to("parallelism.expert_parallel"),
    "parallelism.expert_tensor_parallel_degree": to("parallelism.expert_tensor_parallel"),
    "parallelism.expert_parallel_comm_backend": fact("exchange", "parallelism.expert_parallel"),
    "parallelism.disable_loss_parallel": fact("whole_logits", "training.loss"),
    "parallelism.enable_async_tensor_parallel": lacking("asynchronous tensor parallelism"),
    "parallelism.pipeline_parallel_schedule": to(
        "parallelism.schedule",
        {
            "1f1b": "1f1b",
            "gpipe": "gpipe",
            "interleaved1f1b": "interleaved",
            "interleavedzerobubble": "interleaved",
            "zbvzerobubble": "zb-v",
        },
    ),
    "parallelism.pipeline_parallel_microbatch_size": fact("micro", "training.micro_batch_size"),
    "parallelism.pipeline_parallel_layers_per_stage": lacking("pipeline stages with a set number of layers"),
    "parallelism.module_fqns_per_model_part": lacking("pipeline stages with set modules"),
    "parallelism.pipeline_parallel_split_points": lacking("pipeline stages with set modules"),
    "parallelism.pipeline_parallel_schedule_csv": lacking("a custom schedule"),
    "parallelism.pipeline_parallel_first_stage_less_layers": fact("less_first", "parallelism.pipeline_split"),
    "parallelism.pipeline_parallel_last_stage_less_layers": fact("less_last", "parallelism.pipeline_split"),
    **nothing("changes the implementation only").at(
        "parallelism.context_parallel_load_balancer",
        "parallelism.pipeline_parallel_expert_parallel_overlap parallelism.enable_compiled_autograd",
        "parallelism.enable_approx_mid_point activation_checkpoint*",
    ),
    "activation_checkpoint.mode": fact("checkpoint", "training.recompute"),
    "activation_checkpoint.selective_ac_option": fact("option", "training.recompute"),
    **{
        f"{section}.{name}": meaning
        for section in ("float8", "quantize.linear.float8")
        for name, meaning in (
            ("enable_fsdp_float8_all_gather", float8.GATHER),
            ("recipe_name", fact("fp8_recipe", "training.fp8")),
            ("filter_fqns", fact("fp8_filter", "training.fp8_skip")),
        )
    },
    **nothing("changes how scales are computed, not what is saved").at("float8* quantize.linear.float8*"),
    "quantize*": nothing("part of a converter, which model.converters names"),
    **nothing("logging").at("profiling* metrics*"),
    "checkpoint*": nothing("saving"),
    "validation*": nothing("evaluation is not part of a step"),
    **nothing("data").at("model* data*"),
    "encoder*": lacking("encoders in addition to the model"),
    "hf_transformers*": lacking("transformers' own modules under torchtitan"),
    "inference*": nothing("generation is not estimated"),
}

_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_LLAMAS = ("llama2", "llama3")
_UNTIED_QWENS = ("8b", "14b", "32b")  # Qwen3's smaller flavors tie the LM head to the embedding
_EXPERT_QWENS = ("30b-a3b", "235b-a22b")
_FLAVORS = {
    ("llama3", "405b"): "llama-3.1-405b",
    ("llama4", "17bx16e_irope"): "llama-4-scout",
    ("deepseek_v3", "671b"): "deepseek-v3",
    ("deepseek_v3", "236b"): "deepseek-v2",
    ("deepseek_v3", "16b"): "deepseek-v2-lite",
}
_EXPERT_FLAVORS = (
    *(("llama4", flavor) for flavor in ("17bx16e", "17bx128e")),
    *(("deepseek_v3", flavor) for flavor in ("16b", "236b", "671b")),
)
# models/llama4/__init__.py, model/args.py and model/model.py: every layer has RoPE and full attention, without norms of
# queries and keys. By flavor: number of experts, and every how many layers has some.
_LLAMA4 = {"17bx16e": (16, 1), "17bx128e": (128, 2)}
_LLAMA4_SIZES: Mapping[str, Any] = {
    "model.architecture": "llama4_text",
    "model.num_layers": 48,
    "model.hidden_size": 5120,
    "model.num_attention_heads": 40,
    "model.num_key_value_heads": 8,
    "model.head_dim": 128,
    "model.intermediate_size": 16384,
    "model.vocab_size": 202048,
    "model.tie_word_embeddings": False,
    "model.qk_norm": False,
    "model.sliding_window": 0,
    "model.full_attention_interval": 0,
    "model.rotates_windows_alone": False,
    "model.moe.num_experts_per_token": 1,
    "model.moe.expert_intermediate_size": 8192,
    "model.moe.shared_expert_intermediate_size": 8192,
}


def _model(draft: Draft, name: str, flavor: str) -> None:
    """Set the model of a flavor."""
    preset = _FLAVORS.get((name, flavor)) or preset_of(f"{name}-{flavor}")
    if preset is not None:
        draft.values["preset"] = preset
    elif name == "llama4" and flavor in _LLAMA4:
        experts, interval = _LLAMA4[flavor]
        draft.values.update(_LLAMA4_SIZES)
        draft.values |= {"model.moe.num_experts": experts, "model.moe.expert_interval": interval}
    elif name == "qwen3":  # its flavors have the names of the published models
        published = f"Qwen/Qwen3-{flavor.upper()}"
        if find_shipped(published) is not None:
            draft.values["hf_config"] = published
    if name and not draft.values.keys() & {"preset", "hf_config", "model.num_layers"}:
        draft.unknown_model = f"{name} {flavor}".rstrip()


def _finish(draft: Draft) -> None:
    facts = draft.facts
    name, flavor = str(facts.get("name", "")).lower(), str(facts.get("flavor", "")).lower()
    _model(draft, name, flavor)
    low = str(facts.get("weights", "float32")) in ("bfloat16", "float16")
    draft.default("training.optimizer_implementation", "fused")
    _stages(draft)
    _sharding(draft)
    _precision(draft, casts=not low)
    _units(draft)
    _experts(draft)
    if facts.get("offload") is True:
        place_shards(draft)
    own = not low and _is_modelled(draft, name, flavor)
    _micro_batches(draft)
    _modules(draft, own=own, low=low)
    if not low and draft.values.get("parallelism.tensor_parallel", 1) != 1:  # infra/parallelize.py, apply_tp
        draft.default("parallelism.sequence_parallel", True)
        draft.default("training.loss", "materialized" if facts.get("whole_logits") is True else "vocab-parallel")
    # run_train.sh: as PYTORCH_ALLOC_CONF in 0.2, as PYTORCH_CUDA_ALLOC_CONF in 0.1.
    place_allocator_settings(draft, EXPANDABLE, "torchtitan's run_train.sh")
    float8.torchtitan(draft, facts.get("converters", []))
    _recompute(draft, by_operator=own)
    if draft.given_fields.get("validation.enable", draft.given_fields.get("validation.enabled")) is True:
        _note_validation(draft)


def _modules(draft: Draft, *, own: bool, low: bool) -> None:
    """Set the modules and their recipe: torchtitan's `own`, or plain ones, with weights in 16 bits if `low`."""
    if low:
        draft.default("training.recipe", "pure")
        draft.notes.append(
            "training.dtype sets weights, gradients and optimizer state to 16 bits; counted as plain modules"
        )
    elif own:
        draft.default("training.implementation", "torchtitan")
        draft.notes.append(
            "torchtitan's modules and per-operator checkpointing are modelled as of 0.2.2; earlier releases copy keys "
            "and values for every query head: --set repeat_kv=true"
        )
    else:
        casts = draft.values["training.dtype"] != "fp32" and not draft.values.get("parallelism.zero_stage")
        draft.default("training.recipe", "amp" if casts else "fp32")
        if draft.values["training.dtype"] == "fp32":
            # models/attention.py, sdpa_backends: of the kernels that torchtitan allows only the math one takes fp32.
            draft.default("training.attention", "eager")
        if draft.values.get("parallelism.pipeline_parallel", 1) == 1:
            draft.default("training.logits_until", "loss")  # train.py: `del pred`
        draft.notes.append(
            "torchtitan's own modules are modelled only for Llama, DeepSeek and untied Qwen3, experts and latent "
            "attention under FSDP2 only; counted as plain modules"
        )


def _is_modelled(draft: Draft, name: str, flavor: str) -> bool:
    """Return whether torchtitan's own modules of a model are: those with experts under FSDP2 only."""
    shards: bool = draft.given("parallelism.engine") == "fsdp2"
    is_ring = draft.values.get("parallelism.context_parallel", 1) != 1
    if shards and not is_ring and _known_ranks(draft) in (None, 1):
        return False
    if is_ring and name == "deepseek_v3":
        return False
    if (name, flavor) in _EXPERT_FLAVORS or (name == "qwen3" and flavor in _EXPERT_QWENS):
        return shards
    return name in _LLAMAS or (name == "qwen3" and flavor in _UNTIED_QWENS)


def _note_validation(draft: Draft) -> None:
    """Record validation: 8 sequences of 2,048 tokens by default (config/job_config.py, Validation)."""
    fields, length = draft.given_fields, draft.values.get("training.sequence_length", 2048)
    tokens = [fields.get(f"validation.{name}", silent) for name, silent in (("local_batch_size", 8), ("seq_len", 2048))]
    if all(type(each) is int for each in (*tokens, length)) and length > 0:
        sequences = -(-tokens[0] * tokens[1] // length)
        why = f"its forward pass of {sequences} sequences is counted only if it is smaller than a training step"
        draft.limit("evaluation during training", why, holds_memory=True, sequences=sequences)


def _precision(draft: Draft, *, casts: bool) -> None:
    """Set the compute dtype: fp32 with TP or stages without FSDP (distributed/utils.py, maybe_enable_amp).

    `casts`: whether weights are in fp32, which FSDP or autocast casts.
    """
    given = _PRECISIONS.get(str(draft.facts.get("param", "bfloat16")), "bf16")
    draft.default("training.dtype", given)
    if casts and given != "fp32" and not draft.values.get("parallelism.zero_stage") and _is_split(draft):
        draft.values["training.dtype"] = "fp32"
        draft.notes.append("torchtitan computes in fp32 under tensor or pipeline parallelism without FSDP")


def _is_split(draft: Draft) -> bool:
    """Return whether tensor or pipeline parallelism splits the model."""
    return any(draft.values.get(f"parallelism.{kind}_parallel", 1) != 1 for kind in ("tensor", "pipeline"))


def _sharding(draft: Draft) -> None:
    facts = draft.facts
    shards, replicas, total = facts.get("shards", -1), facts.get("replicas", 1), facts.get("global")
    if type(total) is int and total > 0:
        draft.values["training.global_batch_size"] = total
    ranks = _known_ranks(draft)
    unknown = ranks is None and not _is_split(draft) and not draft.overridden.get("parallelism.zero_stage")
    if shards == -1 and (ranks == replicas or unknown):
        shards = 1  # of one rank there is no FSDP (distributed/parallel_dims.py, fsdp_enabled)
    if shards == 1 and draft.values.get("parallelism.context_parallel", 1) == 1:
        draft.default("parallelism.engine", "ddp")
        draft.default("parallelism.bucket_cap_mb", 100)  # models/llama3/infra/parallelize.py, apply_ddp
        if replicas != 1:
            draft.values["parallelism.data_parallel"] = replicas
        return
    pipelined = draft.values.get("parallelism.pipeline_parallel", 1) != 1
    never = facts.get("reshard") == "never" or (pipelined and facts.get("reshard") != "always")
    place_rotation(draft, facts.get("rotation"))
    draft.default("parallelism.zero_stage", 2 if never else 3)
    draft.default("parallelism.engine", "fsdp2")
    if type(shards) is int and shards > 1:
        draft.values["parallelism.data_parallel"] = shards * (replicas if type(replicas) is int else 1)
    if type(replicas) is int and replicas > 1:
        draft.values["parallelism.data_parallel_replicate"] = replicas


def _experts(draft: Draft) -> None:
    """Set the ranks that split each expert: 1 by default, or those of tensor parallelism without expert parallelism.

    Source: config/job_config.py, Parallelism; models/llama4/infra/parallelize.py, apply_moe_ep_tp.
    """
    if draft.values.get("parallelism.expert_parallel", 1) == 1:
        draft.values.pop("parallelism.expert_tensor_parallel", None)
        return
    draft.default("parallelism.expert_tensor_parallel", 1)
    if draft.facts.get("exchange", "standard") != "standard":
        draft.limit("DeepEP's exchange of tokens", "the standard all-to-all is counted", holds_memory=True)


def _known_ranks(draft: Draft) -> int | None:
    """Return the number of data-parallel ranks, which the launcher decides; None if it is not given."""
    gpus, ranks = draft.overridden.get("parallelism.gpus"), draft.given("parallelism.data_parallel")
    if type(ranks) is int:
        return ranks
    degrees = [draft.given(f"parallelism.{kind}_parallel") or 1 for kind in ("tensor", "pipeline", "context")]
    if type(gpus) is not int or not all(type(degree) is int and degree > 0 for degree in degrees):
        return None
    return gpus // prod(degrees)


def _units(draft: Draft) -> None:
    """Set the mixed-precision policy and the FSDP units (models/llama3/infra/parallelize.py, apply_fsdp)."""
    alone = draft.given("parallelism.data_parallel") == 1 and draft.values.get("parallelism.context_parallel", 1) == 1
    if draft.given("parallelism.engine") != "fsdp2" or alone:
        return
    facts = draft.facts
    draft.default("parallelism.fsdp.param_dtype", str(draft.given("training.dtype")))
    draft.default("parallelism.fsdp.reduce_dtype", _PRECISIONS.get(str(facts.get("reduce", "float32")), "fp32"))
    draft.default("parallelism.fsdp.wrap", "layers-and-ends")


def _stages(draft: Draft) -> None:
    """Split the layers over the stages; in schedules with several chunks each stage has two.

    By default the embedding and the LM head count as a layer each. Without stages the schedule has no effect.
    Source: distributed/pipeline_parallel.py, pipeline_llm; config/job_config.py, Parallelism.
    """
    if draft.values.get("parallelism.pipeline_parallel", 1) == 1:
        draft.values.pop("parallelism.schedule", None)
        return
    less = {draft.facts.get(f"less_{end}", 1) for end in ("first", "last")}
    if less not in ({0}, {1}):
        draft.limit("an uneven pipeline split", "stages have equally many layers", holds_memory=True)
    draft.default("parallelism.pipeline_split", "layers" if less == {0} else "layers-and-ends")
    if draft.values.get("parallelism.schedule") == "interleaved":
        draft.default("parallelism.virtual_stages", 2)


def _micro_batches(draft: Draft) -> None:
    """Split the local batch into a pipeline's micro-batches, of 1 by default (distributed/pipeline_parallel.py)."""
    values, micro = draft.values, draft.facts.get("micro", 1)
    local = values.get("training.micro_batch_size", 1)
    if values.get("parallelism.pipeline_parallel", 1) == 1 or type(local) is not int or type(micro) is not int:
        return
    if 0 < micro < local and local % micro == 0:
        values["training.micro_batch_size"] = micro
        if "training.global_batch_size" not in values:
            values["training.gradient_accumulation_steps"] = local // micro


def _recompute(draft: Draft, *, by_operator: bool) -> None:
    mode, option = str(draft.facts.get("checkpoint", "selective")), str(draft.facts.get("option", "op"))
    if mode == "full":
        draft.default("training.recompute", "full")
    elif mode == "selective" and option.isdecimal() and option.strip("0"):
        # Not parsed as a number: Python rejects more than 4,300 digits. The field rejects values that are too large.
        draft.default("training.recompute", f"every-{option.lstrip('0')}")
    elif mode == "selective" and by_operator:
        draft.default("training.recompute", "selective")
    elif mode == "selective":
        why = "counted without recomputation, so the peak is an upper bound"
        draft.limit("selective per-operator checkpointing", why, holds_memory=False, overcounts="activations")


def _recognized(data: Mapping[str, Any]) -> bool:
    model = data.get("model")
    return isinstance(model, Mapping) and "flavor" in model


TORCHTITAN = FileFormat("torchtitan", "0.2", FIELDS, _finish, _recognized, (GPUS,), framework="torchtitan")
