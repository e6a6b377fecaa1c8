"""The DeepSpeed engine of a rank, and the runs for which it is modelled (DeepSpeed 0.19)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from memcalc.architectures.catalogue import called_modules
from memcalc.architectures.huggingface.catalogue import family_class
from memcalc.architectures.huggingface.family import Family
from memcalc.architectures.structure import block_structure
from memcalc.layout.local_parameters import LocalParameter, stage_parameters
from memcalc.layout.stages import layer_modules, stages_of
from memcalc.sharding.bf16_optimizer import BF16Optimizer
from memcalc.sharding.engine import ROOT, Engine
from memcalc.sharding.zero0 import engine_without_zero
from memcalc.sharding.zero2_sums import ZeRO2Sums, ZeRO2SumsOffload
from memcalc.sharding.zero3 import HookedModules, ZeRO3
from memcalc.sharding.zero3_modules import ModuleCalls, ModuleTree, reference_modules, transformers_modules
from memcalc.sharding.zero3_offload import ZeRO3Offload
from memcalc.sharding.zero3_order import Order
from memcalc.sharding.zero12 import ZeRO12
from memcalc.sharding.zero12_offload import ZeRO12Offload
from memcalc.spec.model import ModelSpec
from memcalc.spec.programs import is_before
from memcalc.spec.recompute_plan import Segment, has_segments
from memcalc.spec.scoring import scores_itself
from memcalc.spec.spec import Spec
from memcalc.spec.training import TOKENWISE
from memcalc.states.state_options import state_options
from memcalc.stream.requests import Requests

# Optimizers with updates of a flat tensor that were compared with runs of DeepSpeed.
COMPARED = ("sgd", "momentum", "adam", "adamw", "lion", "rmsprop", "adamax", "nadam", "radam", "adadelta", "adam-8bit")
# Families with a block of experts in DEFAULT_LEAF_MODULE_CLASSES (runtime/zero/leaf_module_config.py).
EXPERTS_HOOKED_WHOLE = ("mixtral", "qwen2_moe", "qwen3_moe")

# Releases in which backward replaces the gradient of the model's output by a scaled copy: from the first to before the
# second (runtime/engine.py, _backward_prologue_per_tensor).
SCALES_OUTPUT_GRADIENT = "0.18.4", "0.19.6"
# The first release in which stage 3 frees, after backward, parameters that no hook has freed (runtime/zero/stage3.py,
# backward_epilogue).
FREES_LEFTOVERS = "0.19.3"
# The first release in which frozen parameters of a recomputation stay until the backward module that began it
# has ended (runtime/zero/partitioned_param_coordinator.py, update_recompute_parameters).
KEEPS_RECOMPUTED = "0.19.3"
# The first release in which the check for overflow makes no copy of a gradient (runtime/utils.py, has_inf_or_nan), and
# the first one that clones gradients larger than the bucket if states are offloaded (runtime/zero/stage_1_and_2.py,
# reduce_independent_p_g_buckets_and_remove_grads).
REDUCES_OVERFLOW, CLONES_LARGE_GRADIENTS = "0.19.6", "0.19.8"
# The first release in which stage 2 has fp32 sums of the gradients of its partition alone (stage_1_and_2.py,
# _build_compact_grad_partition_buffer). Before, it kept them in 16 bits, whatever grad_accum_dtype was.
SUMS_SHARDS = "0.19.8"
PACKED = "uint8"  # the dtype of packed 4-bit weights, which no cast changes
LORA_CALLS_MODEL = "0.21"  # of PEFT


def deepspeed_engine(
    requests: Requests,
    ordered: Sequence[LocalParameter],
    units: Mapping[int, Sequence[LocalParameter]],
    spec: Spec,
    plan: Segment,
    rank: int | None = None,
) -> Engine:
    """Return the engine of a run for which `lacks` yields nothing.

    Args:
        requests: where they are recorded.
        ordered: all parameters, in registration order.
        units: the same by unit.
        spec: the run.
        plan: its recomputation plan.
        rank: the rank; None: the one that holds most.
    """
    engine = _engine(requests, ordered, units, spec, plan, rank)
    first, after = SCALES_OUTPUT_GRADIENT
    scales = _is_older(spec, after) and not _is_older(spec, first)
    engine.scales_output_gradient = scales and not _computes_loss_by_tokens(spec)
    return engine


def _engine(
    requests: Requests,
    ordered: Sequence[LocalParameter],
    units: Mapping[int, Sequence[LocalParameter]],
    spec: Spec,
    plan: Segment,
    rank: int | None,
) -> Engine:
    options = state_options(spec)
    reduces, clones = (not _is_older(spec, release) for release in (REDUCES_OVERFLOW, CLONES_LARGE_GRADIENTS))
    if options.zero_stage == 0:
        return engine_without_zero(requests, ordered, options, reduces_overflow=reduces)
    if options.sums_apart:
        return BF16Optimizer(requests, ordered, options)
    if options.zero_stage < 3:
        if not options.host.offloads:
            return (ZeRO2Sums if options.sums_shards else ZeRO12)(requests, ordered, options, rank)
        offloading = ZeRO2SumsOffload if options.sums_shards else ZeRO12Offload
        return offloading(requests, ordered, options, rank, reduces_overflow=reduces, clones_large=clones)
    structure = block_structure(spec)
    order = Order(
        _modules(ordered, units, spec),
        stops_inside=not structure.residual.dropout,
        detached=options.model.detached,
        reentrant=structure.saving.reentrant,
        scores_itself=scores_itself(spec),
    )
    family = _transformers_family(spec)
    calls = HookedModules(
        [*order.turns(plan)],
        [*order.scoring_turns()],
        views_experts=family is None or family.transposes_experts,
        frees_leftovers=not _is_older(spec, FREES_LEFTOVERS),
        keeps_recomputed=not _is_older(spec, KEEPS_RECOMPUTED),
        reentrant=structure.saving.reentrant,
    )
    engine = ZeRO3Offload if options.host.offloads else ZeRO3
    return engine(requests, ordered, calls, options)


def _computes_loss_by_tokens(spec: Spec) -> bool:
    """Return whether the model's own forward computes a loss that reads the LM head's weight, and returns no logits."""
    return spec.training.loss in TOKENWISE and state_options(spec).model.loss_in_model


def _transformers_family(spec: Spec) -> type[Family] | None:
    """Return the class that writes the run's modules of transformers; None for the reference decoder."""
    structure = block_structure(spec)
    is_own = structure.implementation != "huggingface" or structure.family is None
    return None if is_own else family_class(str(structure.family))


def _modules(
    ordered: Sequence[LocalParameter], units: Mapping[int, Sequence[LocalParameter]], spec: Spec
) -> ModuleTree:
    tied, structure = spec.model.tie_word_embeddings, block_structure(spec)
    family = _transformers_family(spec)
    if family is None:
        return reference_modules(ordered, units, tied=tied)

    def calls(unit: int) -> ModuleCalls:
        return ModuleCalls(
            () if unit == ROOT else called_modules(structure, layer_modules(spec, unit)),
            family.silent_after,
            family.mlp_is_module,
            family.activation_is_module,
            structure.family in EXPERTS_HOOKED_WHOLE,
        )

    both = family.turns_windows and structure.masks.has_windows and structure.masks.has_full_attention
    rotations = family.rotates + (family.rotates and both)
    return transformers_modules(
        ordered,
        units,
        calls,
        tied=tied,
        reads_head=_computes_loss_by_tokens(spec),
        rotations=rotations,
        wrappers=_wrappers(spec),
    )


def _wrappers(spec: Spec) -> int:
    """Return how many modules PEFT puts around a model with adapters.

    PeftModel calls the model itself. PeftModelForCausalLM, which programs have, calls LoraModel, which since 0.21 calls
    the model, and before called its `forward`, without DeepSpeed's hooks (peft tuners/tuners_utils.py, BaseTuner).
    """
    is_older = is_before(spec.training.versions, "peft", LORA_CALLS_MODEL)
    return 2 if state_options(spec).model.loss_in_model and not is_older else 1


def lacks(spec: Spec, plan: Segment) -> Iterator[str]:
    """Yield the properties of a DeepSpeed run for which the order of requests is not modelled."""
    training, parallelism, options = spec.training, spec.parallelism, state_options(spec)
    whole, stages = options.zero_stage == 3, parallelism.pipeline_parallel
    own = "" if training.dtype == "fp32" else " (its own is mixed-16)"
    nested = any(not isinstance(part, int) for item in plan if not isinstance(item, int) for part in item)
    reasons = {
        "DeepSpeed with tensor or context parallelism": parallelism.ranks != parallelism.data_parallel * stages,
        "DeepSpeed's stages outside of its pipeline engine": stages > 1 and not parallelism.has_pipeline_engine,
        **dict.fromkeys(_pipeline_lacks(spec) if parallelism.has_pipeline_engine else (), True),
        "hierarchical sharding": parallelism.shards != parallelism.data_parallel,
        f"DeepSpeed and recipe {training.recipe} in {training.dtype}{own}": not _is_recipe_known(spec),
        f"DeepSpeed and optimizer {training.optimizer}": training.optimizer not in COMPARED,
        "DeepSpeed and an average of the weights": training.ema != "none",
        "DeepSpeed and FP8": training.fp8 != "none",
        f"ZeRO stage 3 and a loss that is {training.loss}, outside the model": whole
        and training.loss in TOKENWISE
        and not _computes_loss_by_tokens(spec),
        f"DeepSpeed and a loss that is {training.loss}": training.loss not in (*TOKENWISE, "materialized"),
        "ZeRO stage 3 and 4-bit weights": whole and training.finetune == "qlora",
        "DeepSpeed and weights of several dtypes": len(_weight_dtypes(spec, trained=whole)) > 1,
        "DeepSpeed before 0.19": _is_older(spec, "0.19"),
        f"ZeRO stage 2 of DeepSpeed before {SUMS_SHARDS} and fp32 sums of gradients": options.sums_shards
        and not whole
        and _is_older(spec, SUMS_SHARDS),
        "ZeRO stage 3 and nested recomputation": whole and nested,
        # Several forwards of the model in one micro-batch: the order of modules is another one.
        "ZeRO stage 3 and scores of completions": whole and training.framework == "grpo",
        "ZeRO stage 3 and copies of modules that adapters leave out": whole
        and scores_itself(spec)
        and training.lora is not None
        and bool(training.lora.modules_to_save),
    }
    yield from (reason for reason, is_so in reasons.items() if is_so)
    if whole and training.implementation == "huggingface":
        yield from _unknown_modules(spec.model, adapted=training.lora is not None)


def _pipeline_lacks(spec: Spec) -> Iterator[str]:
    """Yield the properties of a run of DeepSpeed's pipeline engine for which the order of requests is not modelled."""
    training, parallelism, model, options = spec.training, spec.parallelism, spec.model, state_options(spec)
    reasons = {
        "masks that stages pass on": parallelism.pipeline_tensors not in (None, "hidden-states"),
        "modules that are not the reference decoder's": training.implementation != "plain",
        "states in host memory": options.host.offloads,
        "its own Adam without ZeRO": options.zero_stage == 0 and options.zero.own_adam,
        "adapters": training.lora is not None,
        "experts": model.moe is not None,
        "offloaded activations": training.offload_activations != "none",
        "evaluation": training.evaluation_batch_size is not None,
        "generated completions": training.completion_length is not None,
        "a reference model": training.reference_model,
        f"a loss that is {training.loss}": training.loss != "materialized",
        "layers in one checkpoint segment": has_segments(training.recompute),
        "recomputed parts of layers": training.recompute == "selective",
        "an emptied cache": training.empty_cache_steps is not None,
    }
    yield from (f"DeepSpeed's pipeline engine and {reason}" for reason, is_so in reasons.items() if is_so)


def _is_recipe_known(spec: Spec) -> bool:
    """Return whether weights are in 16 bits with fp32 master weights, or in fp32 with a copy of them."""
    if spec.training.recipe == "fp32":
        zero = spec.parallelism.zero_optimization
        return spec.parallelism.zero_stage < 3 or zero.copies_fp32_weights
    options = state_options(spec)
    is_summed = options.sums_apart or options.sums_shards
    return (spec.training.recipe == "mixed-16" or is_summed) and spec.training.dtype in ("bf16", "fp16")


def _weight_dtypes(spec: Spec, *, trained: bool) -> set[str]:
    """Return the dtypes of the parameters, or of the trained ones alone, without that of 4-bit weights.

    DeepSpeed casts all to one dtype, unless zero.Init has made the model: then adapters, which are made after it, keep
    theirs (runtime/engine.py, _cast_module_mixed_precision). Trained weights share one flat buffer.
    """
    parameters = [each for each in stage_parameters(spec, stages_of(spec)[0]) if not each.beside]
    dtypes = {each.dtype or spec.training.dtype for each in parameters if each.trains or not trained}
    return dtypes - {PACKED}


def _is_older(spec: Spec, release: str) -> bool:
    """Return whether the run has a release of DeepSpeed before this one."""
    return is_before(spec.training.versions, "deepspeed", release)


def _unknown_modules(model: ModelSpec, *, adapted: bool) -> Iterator[str]:
    """Yield the properties of a model for which the order of transformers' modules is not modelled."""
    reasons = {
        # A convolution's weight is read outside its module (transformers 5.23 models/qwen3_next, models/nemotron_h).
        "ZeRO stage 3 and linear attention or Mamba": model.linear_attention is not None or model.mamba is not None,
        "ZeRO stage 3 and norms without weights": not (
            model.norm_weight and (model.qk_norm_weight or not model.qk_norm)
        ),
        "ZeRO stage 3 and other heads in full attention": model.full_attention is not None,
        # Such a block waits for its parameters in an order that differs from run to run: fetch_sub_module has a set.
        "ZeRO stage 3 and shared or adapted experts in one hooked block": model.architecture in EXPERTS_HOOKED_WHOLE
        and (adapted or bool(model.moe and model.moe.shared_expert_intermediate_size)),
    }
    yield from (reason for reason, is_so in reasons.items() if is_so)
