"""Limits of an estimate: what it leaves out, and whether the run requests memory for it.

A limit holds memory only if this run names it: a field, an option or a file. Features that no config states (loading,
initialization, logging), and what is counted but was never compared with a run, changes no verdict.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.estimation.outside_allocator import communication_library_bytes, least_communication_library_bytes
from memcalc.layout.adapters import adapters_of, first_layer_adapts
from memcalc.layout.parameters import count_parameters
from memcalc.layout.schedules import ORDERED, uses_pipelining
from memcalc.layout.sequence_sharding import has_ring_attention
from memcalc.layout.weight_layout import split_by_dtensor
from memcalc.spec.defaults import takes_math_kernel
from memcalc.spec.finetuning import OWN_LINEAR
from memcalc.spec.hardware.kernels import gpu_omissions, missing_kernel
from memcalc.spec.layers import fills_windows
from memcalc.spec.limits import Limit
from memcalc.spec.model import ModelSpec
from memcalc.spec.model_families.files import family_named
from memcalc.spec.optimizers import BITSANDBYTES
from memcalc.spec.programs import OF_TRANSFORMERS, is_before
from memcalc.spec.spec import Spec
from memcalc.spec.towers import masks_given_images, tower_trains
from memcalc.spec.training import LIGER_FAMILIES
from memcalc.spec.untraced_features import unsplittable
from memcalc.spec.zero import FULLY_SHARDED
from memcalc.states.state_options import state_options
from memcalc.units import format_bytes

# features that no config states
TRAINING = (
    "temporaries of initialization, checkpoint loading and data loading",
    "gradient scaling, evaluation, logging",
)
COMPILERS = {
    False: "torch.compile and CUDA graphs",
    True: "fusion by torch.compile: eager execution is counted; `memcalc dry-run` compiles the step",
}
GENERATION = (
    "loading of the checkpoint; tokens, scores and masks of a sampler beyond greedy choice",
    "beam search, speculative decoding, prefix sharing",
    "torch.compile and CUDA graphs",
)

# Temporaries of optimizer libraries that are not modelled; they take memory.
OPTIMIZER_OMISSIONS: dict[str, tuple[str, ...]] = {
    "galore": ("cuSOLVER's workspace when GaLore decomposes a gradient",),
}

# Open points of FP8 matmuls, by whether they are Transformer Engine's. torchao's fused casts take less than the eager
# ones that are counted.
FP8_OMISSIONS = {
    False: "torch.compile's fusion of torchao's FP8 casts: those of eager execution are counted",
    True: "FP8 matmuls were modelled from Transformer Engine's source and not compared with a run",
}
IMBALANCE = "experts that get more tokens than others: routing is assumed to be balanced"


def limits_of(spec: Spec) -> tuple[Limit, ...]:
    """Return what the estimate of a run leaves out: of the run itself, then of another framework's file."""
    return (*spec_limits(spec), *(resolved(spec, limit) for limit in spec.origin.limits))


def spec_limits(spec: Spec) -> tuple[Limit, ...]:
    """Return what the run's own fields leave out, in the order of `not_modelled`."""
    found = _generation(spec) if spec.inference is not None else _training(spec)
    own = (Limit(what, holds_memory) for what, holds_memory in found)
    return (
        *(Limit(what, holds_memory=False) for what in gpu_omissions(spec.gpu)),
        *_attention(spec),
        *_liger(spec),
        *_before_adapters(spec),
        *_of_split_update(spec),
        *own,
    )


def _before_adapters(spec: Spec) -> Iterator[Limit]:
    """Yield layers before the first one with an adapter, which save nothing if nothing before them trains."""
    adapters = adapters_of(spec) if spec.inference is None else None
    if adapters is not None and not adapters.input_gradient and not first_layer_adapts(spec.model, adapters.targets):
        what = "layers before the first one with an adapter, which save nothing: their activations are counted"
        yield Limit(what, holds_memory=False, overcounts="activations")


def _of_split_update(spec: Spec) -> Iterator[Limit]:
    """Yield an optimizer with operators that DTensor does not run, so that the first step raises.

    Such a run never fits for sure: what a patched optimizer needs is not known.

    Tried with torch 2.13: bitsandbytes 0.50 mixes DTensors with tensors (its issue 1633), as does transformers 5.23's
    Adafactor; PyTorch's own needs other placements in place, and the lists of Rprop have no sharding strategy.
    """
    training, parallelism = spec.training, spec.parallelism
    name, how = training.optimizer, training.optimizer_implementation
    sharded = parallelism.engine == "fsdp2" and parallelism.zero_stage > 0 and parallelism.ranks > 1
    raises = name in (*BITSANDBYTES, "adafactor", "adafactor-hf") or (name, how) == ("rprop", "foreach")
    raises = raises or training.optimizer_options.paged
    if raises and spec.inference is None and (sharded or split_by_dtensor(spec)):
        what = "engine = fsdp2" if sharded else f"tensor_parallel = {parallelism.tensor_parallel}"
        yield Limit(f"{name} under {what}: PyTorch 2.13 cannot update DTensors with it", holds_memory=True)


def _liger(spec: Spec) -> Iterator[Limit]:
    """Yield Liger's kernels in families of which PyTorch's modules, which save more, are counted instead."""
    family = spec.model.architecture
    if spec.training.kernels == "liger" and family not in LIGER_FAMILIES:
        what = f"Liger's kernels in modules of {family}: PyTorch's are counted"
        yield Limit(what, holds_memory=False, overcounts="activations")


def resolved(spec: Spec, limit: Limit) -> Limit:
    """Return a limit of another framework's file with the numbers of this run: batch, sizes and sharding."""
    if limit.sequences:
        beyond = limit.sequences > spec.training.micro_batch_size
        limit = limit._replace(holds_memory=limit.holds_memory and beyond)
    if limit.bytes_per_parameter:
        limit = limit._replace(at_least_bytes=max(limit.at_least_bytes, _copy_bytes(spec, limit.bytes_per_parameter)))
    if limit.parameters_of_whole:
        limit = limit._replace(at_least_bytes=max(limit.at_least_bytes, _rest_bytes(spec, limit.parameters_of_whole)))
    if limit.state_bytes_per_parameter:
        limit = limit._replace(at_least_bytes=max(limit.at_least_bytes, _state_bytes(spec, limit)))
    return limit


def _state_bytes(spec: Spec, limit: Limit) -> int:
    """Return the bytes per GPU of further optimizer state; 0 where it may be sharded, or of adapters alone."""
    parallelism = spec.parallelism
    if parallelism.zero_stage or parallelism.ranks > parallelism.data_parallel or spec.training.finetune != "full":
        return 0
    return limit.state_bytes_per_parameter * count_parameters(spec.model)


def _rest_bytes(spec: Spec, parameters: int) -> int:
    """Return the bytes per GPU of weights beyond the run's model, if the complete model has `parameters` parameters.

    At least 2 bytes per parameter on one GPU or under DDP, ZeRO 1 and 2. 0 where they may be sharded, quantized or in
    host memory. In generation they are also loaded with the model.
    """
    parallelism = spec.parallelism
    if parallelism.ranks > parallelism.data_parallel or parallelism.zero_stage == 3 or parallelism.weights_on_host:
        return 0
    if spec.training.finetune == "qlora" or (spec.inference is not None and spec.inference.quantization != "none"):
        return 0
    return 2 * max(parameters - count_parameters(spec.model), 0)


def _copy_bytes(spec: Spec, width: int) -> int:
    """Return the bytes per GPU of a frozen copy of the model; 0 where the run may have none or keep it elsewhere.

    The copy is sharded like the policy under ZeRO 3 and FSDP, and replicated otherwise (TRL 1.9 trl/models/utils.py,
    prepare_deepspeed and prepare_fsdp). Its dtype is the policy's, or that of the step.
    """
    training, parallelism = spec.training, spec.parallelism
    split = parallelism.tensor_parallel * parallelism.pipeline_parallel * parallelism.expert_parallel
    if training.finetune != "full" or parallelism.weights_on_host or split > 1:
        return 0
    sharded = parallelism.zero_stage == 3 or (parallelism.zero_stage and parallelism.engine in ("fsdp1", "fsdp2"))
    wide = training.recipe in ("fp32", "amp") and parallelism.engine != "deepspeed"  # DeepSpeed casts it
    size = width if wide else min(width, 2)
    return size * count_parameters(spec.model) // (parallelism.shards if sharded else 1)


def _attention(spec: Spec) -> Iterator[Limit]:
    """Yield the kernel that PyTorch takes on a GPU without the counted one: at most its math kernel."""
    run = spec.training if spec.inference is None else spec.inference
    if missing := missing_kernel(run.dtype, run.attention, spec.gpu):
        most = None if spec.inference is not None else _most_of_math_kernel(spec)
        yield Limit(f"attention on a GPU without {missing}", holds_memory=True, at_most_bytes=most)


def _most_of_math_kernel(spec: Spec) -> int | None:
    """Return the most bytes that PyTorch's math kernel needs beyond a fused one; None if not known.

    It upcasts queries, keys and values to fp32, and saves these copies and the probabilities, also in 16 bits after
    dropout, with its mask. Of one layer, scores, probabilities and their gradients are live at once in fp32 (torch 2.13
    aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math). On a null device of compute
    capability 7.5, 8 sequences of 1,024 tokens and 9 heads of 64 save 359 MiB; 12 bytes per score are 864 MiB.
    """
    training, model, parallelism = spec.training, spec.model, spec.parallelism
    split, several = parallelism.ranks > parallelism.data_parallel, training.pairs or training.completion_length
    if split or several or training.evaluation_batch_size is not None or training.teacher or model.mla is not None:
        return None
    tokens = training.micro_batch_size * training.sequence_length
    scores = 12 * model.num_attention_heads * tokens * training.sequence_length
    copies = 4 * 4 * model.num_attention_heads * model.head_dim * tokens
    return (model.num_layers + 2) * (scores + copies)


def _training(spec: Spec) -> Iterator[tuple[str, bool]]:
    training, model = spec.training, spec.model
    yield from _parallel(spec)
    yield from _frozen_model(spec)
    quantizes = training.qlora is not None and training.framework in OF_TRANSFORMERS
    if quantizes and model.architecture in OWN_LINEAR and not is_before(training.versions, "transformers", "5"):
        yield f"16-bit weights of {model.architecture}'s linear layers, which transformers 5 does not quantize", True
    if model.mla is not None and training.implementation != "megatron":
        yield "latent attention was not compared with a run yet", False
    if training.attention == "eager" and takes_math_kernel(
        model.architecture, model.num_key_value_heads, model.norms_per_layer
    ):  # bf16 scores are computed in fp32: torch 2.13 ATen native/transformers/attention.cpp
        yield "the math kernel that attn_implementation sdpa takes for one key head: eager attention is counted", True
    yield from _vision(spec)
    yield from _kernels(model)
    if model.attention_sinks and training.implementation != "huggingface":
        yield "the activations of attention sinks", True
    for what in OPTIMIZER_OMISSIONS.get(training.optimizer, ()):
        yield what, True
    if training.implementation == "plain" and model.architecture is not None:
        for what in family_named(model.architecture).not_modelled:
            yield what, True
    if model.moe is not None:  # no field of the run requests it
        yield IMBALANCE, False
    for what in (*TRAINING, COMPILERS[training.compile]):
        yield what, False
    if most := communication_library_bytes(spec):
        least = format_bytes(least_communication_library_bytes(spec))
        yield f"buffers of the communication library are a planning default: {least} to {format_bytes(most)}", False


def _frozen_model(spec: Spec) -> Iterator[tuple[str, bool]]:
    """Yield limits of a teacher, and of a second model under FSDP2: no backward reshards what its forward does not."""
    training, parallelism = spec.training, spec.parallelism
    if training.teacher is not None and training.evaluation_batch_size is not None:
        yield "the teacher in evaluations", True
    if training.teacher is not None and parallelism.weights_on_host:  # host memory, not GPU memory
        yield "the teacher's weights in host memory", False
    has_own_units = training.teacher is not None or (training.reference_model and training.framework == "torchtune")
    reshards = parallelism.zero_stage == FULLY_SHARDED and state_options(spec).fsdp.reshards_root
    if has_own_units and parallelism.engine == "fsdp2" and parallelism.shards > 1 and not reshards:
        yield "units of the second model that stay gathered between its forward passes", True


def _kernels(model: ModelSpec) -> Iterator[tuple[str, bool]]:
    """Yield packages of kernels that transformers runs where they are installed; they save less."""
    if model.linear_attention is not None:
        yield "the kernels of flash-linear-attention and causal_conv1d: transformers' PyTorch code is counted", False
    if model.mamba is not None:
        yield "the kernels of mamba-ssm and causal-conv1d: transformers' PyTorch code is counted", False


def _vision(spec: Spec) -> Iterator[tuple[str, bool]]:
    config, flash = spec.model.vision_config, spec.training.attention == "flash"
    if config is not None and flash and masks_given_images(config) and not fills_windows(spec):
        yield "masks of batches with images, which rule out flash attention in layers with a window", True
    if tower_trains(spec.model, spec.training):
        yield "activations of the vision tower and its projector", True
    elif spec.model.vision_config is None:
        return
    elif spec.training.vision_tower == "trained":  # PEFT's all-linear includes its linear layers
        yield "adapters of the vision tower, and its activations", True
    else:
        yield "temporaries of the frozen vision tower, which are freed before the language model runs", False


def _parallel(spec: Spec) -> Iterator[tuple[str, bool]]:
    parallelism, megatron = spec.parallelism, spec.training.implementation == "megatron"
    exchanges_keys = parallelism.context_parallel > 1 and parallelism.context_parallel_method != "all-to-all"
    if exchanges_keys and not has_ring_attention(spec):
        yield "the ring buffers of keys and values under context parallelism", True
    if split_by_dtensor(spec) and (found := unsplittable(spec)):
        yield f"layers split by PyTorch's DTensor were not compared with a run here: {found[1]}", False
    if parallelism.engine == "fsdp1" and parallelism.data_parallel > 1:  # a GPU waits for events: Tensor.record_stream
        late = "in a replay's interval also as late as possible, if the host waits for the GPU once a step"
        yield f"memory that FSDP1 frees while another CUDA stream uses it: counted as free at once, and {late}", False
    if megatron:
        yield "the workspace of cuDNN's attention, which is assumed to be that of flash attention", False
    if megatron and spec.model.moe is not None and parallelism.tensor_parallel > 1:
        yield "Megatron-Core's experts under tensor parallelism were not compared with a run yet", False
    if spec.training.fp8 != "none":
        yield FP8_OMISSIONS[megatron], False
    if parallelism.offload != "none" and parallelism.engine == "deepspeed":  # host memory, not GPU memory
        yield "host pages and pinned memory that DeepSpeed uses in addition to offloaded tensors", False
    compared = ORDERED if uses_pipelining(spec) else ("1f1b", "gpipe")
    if parallelism.schedule not in compared:
        yield (
            f"schedule {parallelism.schedule} was not compared with a run; its paper gives the micro-batches in flight",
            False,
        )


def _generation(spec: Spec) -> Iterator[tuple[str, bool]]:
    inference = spec.inference
    assert inference is not None
    for what in GENERATION:
        yield what, False
    if inference.cache == "paged":
        what = "a serving engine's own buffers: vLLM was read, not measured; it uses all free GPU memory as cache"
        yield what, False
    if spec.model.moe is not None:
        yield IMBALANCE, False
    if spec.parallelism.tensor_parallel > 1 or spec.parallelism.pipeline_parallel > 1:
        yield "communication buffers of several ranks; generation over several GPUs was not compared with a run", False
