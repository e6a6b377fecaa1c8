"""Options of a run that model states depend on; and groups of parameters with identical options."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from memcalc.architectures.options.execution import float8_of
from memcalc.layout.adapters import adapters_of, loss_gathers_head
from memcalc.layout.flat_parameters import part_of
from memcalc.layout.local_parameters import LocalParameter, LocalParameters, stage_parameters
from memcalc.layout.peft_parameters import adapters_follow_the_head
from memcalc.layout.spec_cache import cached_by_spec
from memcalc.layout.stages import stages_of
from memcalc.layout.weight_layout import sums_unsharded
from memcalc.operators.float8 import Float8
from memcalc.spec.finetuning import base_dtype
from memcalc.spec.hardware.kernels import multiprocessors
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES
from memcalc.spec.spec import Spec
from memcalc.spec.training import TOKENWISE
from memcalc.spec.zero import ZeroSpec, runs_bf16_optimizer
from memcalc.states.optimizers.update_rule import UpdateRule, update_of
from memcalc.states.parameter_copies import ShardCounts
from memcalc.states.transformer_engine import in_8_bits
from memcalc.workspaces.multiprocessors import Multiprocessors

RESHARDS_ROOT = (2, 8)  # the first torch version in which the root's reshard_after_forward=True has an effect


class TrainingStepOptions(NamedTuple):
    """What a training step does with gradients besides the update."""

    clips: bool
    ema: str
    zeroes_gradients: bool
    zeroes_gradients_before_backward: bool  # gradients of the previous step are live during the next forward and loss
    accumulates: bool  # several backwards, of micro-batches or of chunks of layers, precede the update
    sums_unsharded: bool = False  # gradients are reduced only in the last micro-batch
    updates_in_backward: bool = False  # each parameter is updated as soon as its gradient is complete
    pipelined: bool = False  # DeepSpeed's pipeline engine reduces the gradients


class FsdpOptions(NamedTuple):
    """Units of FSDP1 and FSDP2, and their dtypes."""

    gathered: str = ""  # dtype of the all-gather; "": that of the parameters
    reduced: str = ""  # dtype of the reduce-scatter; "": that of the gradients
    wraps_embedding_and_head: bool = False  # the embedding is a unit; final norm and LM head are another
    ties_ends: bool = False  # tied, all three are one unit, which is counted with the root
    head_is_unit: bool = False  # the LM head is in a unit: that one or, with tied weights, the root's
    reshards_root: bool = False  # FSDP2: the root's parameters do not stay gathered between forward and backward
    finds_norm: bool = True  # the final norm is in that unit; Accelerate finds none below PEFT's modules
    gathers_output_alone: bool = False  # the loss reads the LM head's weight, a unit of which no module runs
    gathers_last_layer_once: bool = False  # the last layer is not resharded after forward
    trained_apart: bool = False  # FSDP1: each module that trains is a unit
    layers: int = 0  # FSDP1: of the model
    joined_parts: tuple[str, ...] = ()  # FSDP1: parts of layers that are in the root's unit
    least_apart: int = 0  # FSDP1: parameters from which on a module outside of layers is a unit; 0: none is
    has_body: bool = False  # FSDP1: the root's parameters are those of a unit, the model without its LM head
    use_orig_params: bool = False  # FSDP1: the optimizer updates views of parameters, not flat parameters
    loaded: str = ""  # FSDP1: dtype in which weights are flattened; "": that of the shards
    forward_prefetch: bool = False  # FSDP1: forward gathers the next unit before it needs it
    backward_prefetch: str = "pre"  # FSDP1: when backward gathers the next unit
    expert_units: bool = False  # FSDP2: the routed experts of a layer, which other ranks share, are a unit
    float8_gather: Float8 | None = None  # torchao's layers, where FSDP2 gathers their weights in FP8


class HostOptions(NamedTuple):
    """What is in host memory."""

    offloads: bool = False  # master weights, gradients and optimizer states
    has_weights: bool = False
    pins: bool = False  # the memory is pinned


class ModelOptions(NamedTuple):
    """What model states and the order of an engine depend on in the model itself."""

    loss_in_model: bool = False  # the model's forward computes the loss
    late_adapters: bool = False  # adapters are created after the peak of model construction
    detached: bool = False  # the first layer's input needs no gradient
    fp8_weights: bool = False  # Transformer Engine's linear layers store FP8 weights alone
    recomputes: bool = False  # every layer is recomputed; DeepSpeed's stage 3 then gathers modules in another order
    has_reference_model: bool = False  # a frozen reference copy of the model is resident


class StateOptions(NamedTuple):
    """Options that model states depend on, apart from the parameters themselves."""

    recipe: str
    compute: str
    base: str  # dtype of the weights that forward reads
    gradients: str | None  # dtype in which gradients are accumulated, where it differs from the recipe's
    update: UpdateRule
    engine: str
    zero_stage: int
    data_parallel: int  # ranks that ZeRO shards across
    expert_shards: int  # ranks that routed experts are sharded across
    replicates: bool  # HSDP: several groups all-reduce the gradients that each has reduced
    card: Multiprocessors
    torch: tuple[int, int]
    step: TrainingStepOptions
    fsdp: FsdpOptions
    zero: ZeroSpec  # DeepSpeed's buffer sizes
    host: HostOptions
    model: ModelOptions
    stored_dtype: str = ""  # dtype of the stored weights, where it is not `base`

    def without_accumulation(self) -> StateOptions:
        """Return the options of the first micro-batch of a step, which meets no gradients of earlier ones."""
        return self._replace(step=self.step._replace(accumulates=False))

    def without_clipping(self) -> StateOptions:
        """Return the options of an optimizer that an engine gives clipped gradients."""
        return self._replace(step=self.step._replace(clips=False))

    @property
    def summed(self) -> str:
        """The dtype of sums of unsharded gradients: under FSDP2 that of the reduce-scatter, under FSDP1 autograd's."""
        if self.engine == "fsdp1":
            return self.fsdp.gathered or self.base
        return self.fsdp.reduced or self.fsdp.gathered or self.base

    @property
    def partitions_gradients(self) -> bool:
        """Whether DeepSpeed takes every gradient as it is produced and keeps a shard of the reduced gradient.

        Its stages do so on one rank, too, where the shard is the whole gradient.
        """
        return self.flattens_weights and not self.sums_apart

    @property
    def flattens_weights(self) -> bool:
        """Whether DeepSpeed's optimizer flattens the weights, and updates a rank's partition of the flat tensor."""
        return self.engine == "deepspeed" and self.zero_stage >= 1

    @property
    def sums_apart(self) -> bool:
        """Whether DeepSpeed's BF16_Optimizer sums all gradients in a flat tensor, in addition to autograd's."""
        return self.zero.bf16_optimizer

    @property
    def sums_shards(self) -> bool:
        """Whether DeepSpeed's stages 2 and 3 sum the shards of 16-bit gradients in fp32 (grad_accum_dtype)."""
        is_summed = self.partitions_gradients and RECIPES[self.recipe].main_gradients_live == "backward"
        return is_summed and self.zero_stage > 1

    @property
    def shards_weights(self) -> bool:
        """Whether each rank has shards of the weights that forward reads, which are gathered for it."""
        from_stage = 1 if self.engine in ("fsdp1", "fsdp2") else 3
        return self.engine != "megatron" and self.zero_stage >= from_stage and self.data_parallel > 1

    @property
    def is_deepspeed_without_zero(self) -> bool:
        """Whether DeepSpeed's engine trains a whole model on each rank, and reduces the gradients themselves."""
        return self.engine == "deepspeed" and self.zero_stage == 0

    @property
    def updates_when_made(self) -> bool:
        """Whether DeepSpeed's optimizer creates its states when it is made, by an update with gradients of zeros.

        That of 16-bit weights without ZeRO (runtime/fp16/unfused_optimizer.py, initialize_optimizer_states).
        """
        return self.is_deepspeed_without_zero and RECIPES[self.recipe].master is not None

    @property
    def flattens_fp32_gradients(self) -> bool:
        """Whether the step casts each gradient to fp32, then flattens them (runtime/fp16/fused_optimizer.py, step)."""
        return self.updates_when_made and self.zero.own_adam

    @property
    def frees_gradients_in_step(self) -> bool:
        """Whether no gradient stays until the next zero_grad: DeepSpeed frees them at the end of its step."""
        return self.engine == "deepspeed"

    @property
    def reduces_after_backward(self) -> bool:
        """Whether gradients stay unsharded until backward ends: DeepSpeed's stage 1, without overlap."""
        return self.partitions_gradients and self.zero_stage == 1

    @property
    def frees_gradients_before_update(self) -> bool:
        """Whether DeepSpeed's stages 1 and 2 free the 16-bit gradients before the update, as they do before the last.

        The update needs their fp32 copy only. Source: runtime/zero/stage_1_and_2.py, step (averaged_gradients).
        """
        one_group, cast = not self.zero.separate_no_decay, self.compute != "fp32" and not self.sums_shards
        return self.partitions_gradients and self.zero_stage < 3 and one_group and cast

    @property
    def has_two_buckets(self) -> bool:
        """Whether gradients fill one bucket while another is reduced (stage_1_and_2.py, setup_buckets)."""
        return self.partitions_gradients and self.zero_stage < 3 and self.zero.overlaps(self.zero_stage)

    @property
    def copies_fp32_weights(self) -> bool:
        """Whether DeepSpeed's optimizer updates a copy of weights that are fp32: always at stages 1 and 2."""
        copied = self.zero_stage < 3 or self.zero.copies_fp32_weights
        return self.partitions_gradients and copied and self.base == "fp32"

    @property
    def creates_masters_after_flattening(self) -> bool:
        """Whether DeepSpeed's stages 1 and 2 peak while weights are flattened, before master weights exist.

        A second copy of the weights compares with 4P/N of master weights and 4P/N of zeros: it is larger in bf16 or
        fp16 with more than four ranks, in fp32 with more than two.
        """
        later = 8 if RECIPES[self.recipe].master or self.copies_fp32_weights else 4
        more = DTYPE_BYTES[self.base] * self.data_parallel > later
        return self.partitions_gradients and self.zero_stage < 3 and more

    def spread(self, from_stage: int) -> ShardCounts:
        """Return the shard counts of a copy that is sharded from a ZeRO stage on."""
        if self.zero_stage < from_stage:
            return ShardCounts(1, 1, self.engine)
        return ShardCounts(self.data_parallel, self.expert_shards, self.engine, self.fsdp.expert_units)


@cached_by_spec
def state_options(spec: Spec) -> StateOptions:
    """Return the options of a run."""
    training, parallelism, base = spec.training, spec.parallelism, base_dtype(spec.training)
    main_gradients = RECIPES[training.recipe].main_gradients
    return StateOptions(
        recipe=training.recipe,
        compute=training.dtype,
        base=base,
        gradients=None if training.gradient_dtype in (None, main_gradients) else training.gradient_dtype,
        update=update_of(training, base, spec.model.architecture),
        # Megatron-Core's modules use its optimizer and buffers even where nothing is sharded.
        engine="megatron" if training.implementation == "megatron" else parallelism.engine,
        zero_stage=parallelism.zero_stage,
        data_parallel=parallelism.shards,
        expert_shards=parallelism.expert_shards,
        replicates=parallelism.data_parallel_replicate > 1,
        card=multiprocessors(spec.gpu),
        torch=training.torch,
        step=_step_options(spec),
        fsdp=_fsdp_options(spec),
        zero=_zero_options(spec),
        host=HostOptions(
            parallelism.offload in ("optimizer", "all"), parallelism.weights_on_host, parallelism.offload_pin_memory
        ),
        model=_model_options(spec),
    )


def _zero_options(spec: Spec) -> ZeroSpec:
    """Return DeepSpeed's options as they take effect; with pipelines reductions never overlap with backward.

    Source: DeepSpeed 0.19 runtime/engine.py, _configure_zero_optimizer.
    """
    zero, update = spec.parallelism.zero_optimization, {"bf16_optimizer": runs_bf16_optimizer(spec)}
    if spec.parallelism.has_pipeline_engine:
        update["overlap_comm"] = False
    taken = {name: value for name, value in update.items() if getattr(zero, name) != value}
    return zero.model_copy(update=taken) if taken else zero


def _step_options(spec: Spec) -> TrainingStepOptions:
    training = spec.training
    return TrainingStepOptions(
        clips=training.gradient_clipping is not None,
        ema=training.ema,
        zeroes_gradients=training.zero_grad == "zero",
        zeroes_gradients_before_backward=training.zero_grad_before == "backward",
        accumulates=spec.training.gradient_accumulation_steps > 1 or spec.parallelism.virtual_stages > 1,
        sums_unsharded=sums_unsharded(spec),
        updates_in_backward=training.optimizer_in_backward,
        pipelined=spec.parallelism.has_pipeline_engine,
    )


def _fsdp_options(spec: Spec) -> FsdpOptions:
    training, fsdp, has_adapters = spec.training, spec.parallelism.fsdp, adapters_of(spec) is not None
    # Stages of a pipeline have separate copies of the tied weight.
    ties = spec.model.tie_word_embeddings and spec.parallelism.pipeline_parallel == 1 and not has_adapters
    return FsdpOptions(
        gathered=fsdp.param_dtype or "",
        reduced=fsdp.reduce_dtype or fsdp.param_dtype or "",
        # Tied, embedding, final norm and LM head are one unit, gathered and reduced with the root module, unless the
        # norm is the root's.
        wraps_embedding_and_head=fsdp.wrap == "layers-and-ends" and not ties,
        ties_ends=fsdp.wrap == "layers-and-ends" and ties,
        head_is_unit=fsdp.wrap == "layers-and-ends" and training.loss not in TOKENWISE,
        reshards_root=fsdp.reshard_root and training.torch >= RESHARDS_ROOT,
        finds_norm=not has_adapters,
        gathers_output_alone=loss_gathers_head(spec),
        # torchtitan at ba2469780; later versions wrap embedding and LM head as well.
        gathers_last_layer_once=training.implementation == "torchtitan" and fsdp.wrap == "layers",
        trained_apart=fsdp.wrap == "layers-and-trained",
        layers=spec.model.num_layers,
        joined_parts=_joined_parts(spec),
        least_apart=fsdp.least_unit_parameters if fsdp.wrap == "size" else 0,
        has_body=fsdp.wrap == "size" and training.implementation == "huggingface",
        use_orig_params=fsdp.use_orig_params,
        loaded=fsdp.load_dtype or "",
        forward_prefetch=fsdp.forward_prefetch,
        backward_prefetch=fsdp.backward_prefetch,
        expert_units=has_expert_units(spec),
        float8_gather=float8_of(spec) if training.fp8_all_gather else None,
    )


def has_expert_units(spec: Spec) -> bool:
    """Return whether routed experts are units of FSDP2 of their own, as in torchtitan with expert parallelism."""
    parallelism = spec.parallelism
    own = spec.training.implementation == "torchtitan" and parallelism.engine == "fsdp2"
    return own and parallelism.expert_parallel > 1


def _joined_parts(spec: Spec) -> tuple[str, ...]:
    """Return the parts of a layer that are in no unit of FSDP1 but the root's.

    A part, such as attention, is a unit if it is large enough, then the layer is one of its other parameters if these
    are. Several units of a layer are counted as one. Source: torch 2.13 distributed/fsdp/wrap.py, _recursive_wrap.
    """
    fsdp, sizes = spec.parallelism.fsdp, dict[str, int]()
    if fsdp.wrap not in ("model", "size"):
        return ()
    for each in stage_parameters(spec, stages_of(spec)[0]):
        if each.where == "layer":
            sizes[part_of(each)] = sizes.get(part_of(each), 0) + each.elements
    least = math.inf if fsdp.wrap == "model" else fsdp.least_unit_parameters
    small = {part: size for part, size in sizes.items() if size < least}
    return tuple(small) if sum(small.values()) < least else ()


def _model_options(spec: Spec) -> ModelOptions:
    training, parallelism, adapters = spec.training, spec.parallelism, adapters_of(spec)
    is_stage_3 = parallelism.engine == "deepspeed" and parallelism.zero_stage == 3
    return ModelOptions(
        # transformers computes its own loss; memcalc's step and custom loops may compute the loss from the logits.
        loss_in_model=training.implementation == "huggingface" and training.framework not in (None, "loop"),
        late_adapters=adapters_follow_the_head(spec),
        detached=adapters is not None and not adapters.input_gradient,
        fp8_weights=training.fp8_params,
        recomputes=is_stage_3 and training.recompute == "full",
        has_reference_model=training.reference_model,
    )


def groups(parameters: LocalParameters, options: StateOptions) -> Iterator[tuple[LocalParameters, StateOptions, bool]]:
    """Yield groups of parameters with the same dtype, their options, and whether they train."""
    found: dict[tuple[str, bool], list[LocalParameter]] = {}
    for parameter in parameters:
        found.setdefault((parameter.dtype, parameter.trains), []).append(parameter)
    if len(found) == 1 and ("", True) in found:
        # FP8 weights have separate buffers (Megatron-LM core/distributed/param_and_grad_buffer.py)
        if options.model.fp8_weights:
            narrow = LocalParameters(each for each in parameters if in_8_bits(each))
            yield LocalParameters(each for each in parameters if not in_8_bits(each)), options, True
            yield narrow, options._replace(stored_dtype="uint8"), True
            return
        yield parameters, options, True
        return
    for (dtype, trains), rows in found.items():
        own = options
        if dtype:
            own = options._replace(base=dtype, compute=dtype, update=options.update.of_weights(options.recipe, dtype))
        model = own.model._replace(late_adapters=own.model.late_adapters and trains)
        yield LocalParameters(rows), own._replace(model=model), trains
