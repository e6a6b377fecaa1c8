"""Options of how modules run: sharding, what is saved for backward, dtypes, and the class of linear layers."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.layout.adapters import Adapters, adapters_of, read_dtype, replaces_linears
from memcalc.layout.fake_quantized_layers import fake_quantized_chunks, fake_quantized_layers
from memcalc.layout.stages import recomputed_windows
from memcalc.layout.weight_layout import split_by_dtensor, table_gradient_is_unsharded
from memcalc.operators.base import Dtypes, LinearLayers
from memcalc.operators.fake_quantized_linear import FakeQuantization
from memcalc.operators.float8 import Float8
from memcalc.spec.hardware.kernels import needs_columns
from memcalc.spec.programs import is_before
from memcalc.spec.spec import Spec
from memcalc.spec.training import ParallelismSpec

SETS_USE_CACHE = "5.0"  # of transformers: the first release with a Trainer that sets `use_cache`, by default to false
CONCATENATES_CACHE = "4.56"  # of transformers: the first release with a cache that concatenates the first keys, too


class ShardingOptions(NamedTuple):
    """Dimensions in which a rank has a part of the model or of the sequence."""

    tensor_parallel: bool  # t > 1
    sequence_parallel: bool
    dtensor: bool  # by DTensor (memcalc/step/reference/tensor_parallel.py); else by Megatron-LM's modules
    unsharded_embedding_gradient: bool  # the gradient of a sharded embedding, see `table_gradient_is_unsharded`
    context_parallel: bool  # c > 1: the rank has a part of every sequence
    all_to_all: bool  # context parallelism by an all-to-all of heads and tokens
    expert_parallel: bool  # e > 1
    expert_suffix: str  # "/t" or "/t_e" where each expert is sharded across ranks, else ""

    @property
    def tokens(self) -> str:
        """The sequence axis of norms and residuals."""
        return "s/t" if self.sequence_parallel else "s"

    def axis(self, name: str) -> str:
        """Return an axis of a sharded weight or of heads on one tensor-parallel rank."""
        return f"{name}/t" if self.tensor_parallel else name


def sharding_of(spec: Spec) -> ShardingOptions:
    """Return the options of sharding."""
    parallelism = spec.parallelism
    tensor_parallel, context_parallel = parallelism.tensor_parallel > 1, parallelism.context_parallel > 1
    return ShardingOptions(
        tensor_parallel=tensor_parallel,
        sequence_parallel=parallelism.sequence_parallel and tensor_parallel,
        dtensor=split_by_dtensor(spec),
        unsharded_embedding_gradient=table_gradient_is_unsharded(spec),
        context_parallel=context_parallel,
        all_to_all=context_parallel and parallelism.context_parallel_method == "all-to-all",
        expert_parallel=parallelism.expert_parallel > 1,
        expert_suffix=_expert_suffix(parallelism),
    )


def _expert_suffix(parallelism: ParallelismSpec) -> str:
    if parallelism.expert_width_ranks == parallelism.tensor_parallel:
        return "/t" if parallelism.tensor_parallel > 1 else ""
    return "/t_e" if parallelism.expert_width_ranks > 1 else ""


class SavingOptions(NamedTuple):
    """What forward keeps for backward: recomputation, offloading, and a KV cache that nobody reads."""

    selective: bool
    recomputed_modules: tuple[str, ...]  # modules of selective recomputation, Megatron-LM's names
    kept_results: tuple[str, ...]  # operators with results that recomputed layers keep
    checkpoints_layers: bool  # layers are checkpoints, so their arguments stay live until recomputation
    reentrant: bool  # a recomputed layer runs a backward of its own
    recomputed_windows: bool  # some layers with a window are recomputed, so their arguments stay live
    recomputed_others: bool  # some layers without a window are recomputed, so their arguments stay live
    on_host: str  # type of host memory for saved tensors
    frees_tables: bool  # saved tensors are offloaded and none recomputed, so tables end with forward
    training_cache: str  # the model's output has a KV cache in training: "references" or "copies"
    without_gradients: bool = False  # an evaluation between steps


def saving_of(spec: Spec) -> SavingOptions:
    """Return the options of recomputation and offloading."""
    training = spec.training
    selective = training.recompute == "selective"
    theirs = training.implementation == "huggingface"
    of_windows, of_others = recomputed_windows(spec) if theirs else (False, False)
    on_host = "none" if spec.inference is not None else training.offload_activations
    return SavingOptions(
        selective=selective,
        recomputed_modules=training.recompute_modules if selective else (),
        kept_results=training.recompute_keep,
        checkpoints_layers=training.recompute not in ("none", "selective"),
        reentrant=_is_reentrant(spec) and training.recompute not in ("none", "selective"),
        recomputed_windows=of_windows,
        recomputed_others=of_others,
        on_host=on_host,
        frees_tables=on_host != "none"
        and training.recompute == "none",  # a checkpoint's closure references them as arguments
        training_cache=_training_cache(spec),
    )


def _is_reentrant(spec: Spec) -> bool:
    """Return whether checkpoints are reentrant, as those of DeepSpeed's pipeline engine (runtime/pipe/engine.py)."""
    training = spec.training
    if training.implementation == "huggingface":
        return training.reentrant_checkpoints
    return training.implementation == "plain" and spec.parallelism.has_pipeline_engine


def _training_cache(spec: Spec) -> str:
    """Return how forward caches keys and values in training, if it does.

    Before transformers 5 the Trainer leaves the config's `use_cache: true`, unless layers are recomputed. From 4.56 on
    DynamicLayer.update (cache_utils.py) concatenates them with an empty tensor of the keys' dtype: a copy.
    """
    training = spec.training
    caches = training.framework == "trainer" and is_before(training.versions, "transformers", SETS_USE_CACHE)
    if not caches or training.recompute != "none" or spec.inference is not None:
        return "none"
    return "references" if is_before(training.versions, "transformers", CONCATENATES_CACHE) else "copies"


def dtypes_of(spec: Spec) -> Dtypes:
    """Return the dtypes of modules.

    torchtitan has no autocast under FSDP2, which casts gathered parameters; Megatron-Core casts the whole model.
    """
    training = spec.training
    gathers_casts = training.implementation == "torchtitan" and spec.parallelism.engine == "fsdp2"
    may_autocast = training.implementation != "megatron" and not gathers_casts
    return Dtypes(
        compute=training.dtype,
        parameters=read_dtype(spec),
        autocast=training.autocasts and may_autocast,
        # lightning 2.6 pytorch/plugins/precision/amp.py, autocast_context_manager: cache_enabled=False
        # axolotl's loss is outside Accelerate's autocast, which has then dropped the casts that backward does not read.
        caches_casts=not (training.autocasts and (training.framework == "lightning" or training.loss == "selective")),
        fp32_modules=training.fp32_modules,
    )


def linears_of(spec: Spec) -> LinearLayers:
    """Return the classes of linear layers."""
    training = spec.training
    fp8 = training.fp8 if training.implementation == "megatron" else "none"
    return LinearLayers(
        adapters=_adapters_read(spec),
        replaced=replaces_linears(spec),
        float8=float8_of(spec),
        fake_quantization=fake_quantization_of(spec),
        fp8=fp8,
        fp8_columns=fp8 != "none" and needs_columns(fp8, spec.gpu),
    )


def _adapters_read(spec: Spec) -> Adapters | None:
    """Return the adapters, with the dtype that modules read.

    PEFT casts an adapter's input to the dtype of its weight (peft 0.21 tuners/lora/layer.py, Linear.forward). Where the
    adapter is a unit of FSDP1, that is the dtype of its shard, since the unit is gathered afterwards; without original
    parameters only until the first gather, which is counted for all passes.
    """
    found, gathered = adapters_of(spec), spec.parallelism.fsdp.param_dtype
    if found is None or gathered is None:
        return found
    stored = found.dtype if spec.parallelism.engine == "fsdp1" else ""
    return found._replace(dtype=gathered, input_dtype=stored)


def float8_of(spec: Spec) -> Float8 | None:
    """Return the options of torchao's FP8 linear layers; None without them."""
    training = spec.training
    if training.fp8 == "none" or training.implementation == "megatron" or spec.inference is not None:
        return None
    return Float8(training.fp8, training.fp8_skip, training.fp8_all_gather)


def fake_quantization_of(spec: Spec) -> FakeQuantization | None:
    """Return the options of torchao's fake-quantized linear layers; None without them."""
    training = spec.training
    if training.fake_quantization == "none" or spec.inference is not None:
        return None
    return FakeQuantization(
        training.fake_quantization_group,
        fake_quantized_layers(spec),
        fake_quantized_chunks(spec),
        by_range=training.fake_quantization == "int8-int4-by-range",
    )
