"""Copies of the parameters that a recipe keeps (memcalc/spec/recipes.py), and a moving average."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import BIT, from_phase, mask_of
from memcalc.spec.recipes import RECIPES
from memcalc.states.parameter_copies import ParameterCopy, Role
from memcalc.states.state_options import StateOptions

NEVER = 4  # beyond ZeRO's last stage: never sharded
PASSES = mask_of(*(f"{phase}_{step}" for phase in ("forward", "loss", "backward") for step in (1, 2)))
ZERO = "ZeRO (arXiv 1910.02054) section 3"


def kept_copies(options: StateOptions, *, trains: bool) -> Iterator[ParameterCopy]:
    """Yield every copy of the parameters that lives for several phases; of frozen ones weights and average."""
    # FSDP always shards weights: its stage 2 keeps gathered parameters from forward to backward.
    weights_from = 2 if options.engine in ("fsdp1", "fsdp2") else 3
    citation = "the parameters that forward reads"
    made = "optimizer" if options.model.late_adapters else "model"
    held_in = options.stored_dtype or options.base
    yield ParameterCopy(Component.WEIGHTS, "", held_in, weights_from, from_phase(made), citation, role=Role.WEIGHTS)
    if options.model.has_reference_model:
        citation = "the weights of a reference model (arXiv 2305.18290), loaded as the policy is"
        name = " of the reference model"
        yield ParameterCopy(Component.WEIGHTS, name, held_in, 3, from_phase("optimizer"), citation, role=Role.REFERENCE)
    if not trains:
        if options.step.ema == "weights":  # of the whole model
            yield from average(options.step.ema, held_in, weights_from)
        return
    recipe = RECIPES[options.recipe]
    if recipe.master is not None or options.copies_fp32_weights:
        citation = f"{ZERO}.1: an fp32 copy that the optimizer updates"
        made = "input" if options.creates_masters_after_flattening else "optimizer"
        phases, role = from_phase(made), Role.MASTER_WEIGHTS
        yield ParameterCopy(
            Component.MASTER_WEIGHTS, " master", recipe.master or "fp32", 1, phases, citation, role=role
        )
    if options.sums_shards:
        yield from _sums_of_shards(options)
        yield from average(options.step.ema, options.base, weights_from)
        return
    # DeepSpeed's stage 1 reduces and frees them after backward; its BF16_Optimizer keeps all of them
    gradients_from = NEVER if options.sums_apart else 1 if options.engine == "deepspeed" else 2
    if not options.step.updates_in_backward:  # then they are events of backward
        yield from _gradients(options, gradients_from)
    if options.sums_apart:
        yield from _sums_apart(options)
    elif recipe.main_gradients is not None:
        yield from _main_gradients(options, recipe.main_gradients, gradients_from)
    yield from average(options.step.ema, options.base, weights_from)


def _gradients(options: StateOptions, gradients_from: int) -> Iterator[ParameterCopy]:
    mask = _gradient_mask(options)
    citation = "autograd: .grad, from backward to zero_grad"
    copy = ParameterCopy(
        Component.GRADIENTS,
        " gradient",
        options.base,
        gradients_from,
        mask,
        citation,
        gradient_shaped=True,
        role=Role.GRADIENTS,
    )
    is_transient = RECIPES[options.recipe].gradients is None
    if options.step.sums_unsharded:
        yield from _unsharded_sums(copy, options, with_shards=not is_transient)
    elif mask and not is_transient:
        yield from _whole_until_reduced(copy, options)


def _sums_apart(options: StateOptions) -> Iterator[ParameterCopy]:
    """Yield the sums of all gradients, which are zeroed in place, and the fp32 copy of a rank's partition of them."""
    citation = "DeepSpeed 0.19 runtime/bf16_optimizer.py: fp32_groups_gradients_flat"
    dtype, role = options.gradients or "fp32", Role.MASTER_GRADIENTS
    name = " gradient, summed"
    yield ParameterCopy(Component.GRADIENTS, name, dtype, NEVER, from_phase("optimizer"), citation, role=role)
    if dtype != "fp32":
        citation = "DeepSpeed 0.19 runtime/bf16_optimizer.py: step"
        mask, name = mask_of("optimizer_step_1", "optimizer_step_2"), " gradient in fp32"
        yield ParameterCopy(Component.GRADIENTS, name, "fp32", 1, mask, citation, role=role)


def _sums_of_shards(options: StateOptions) -> Iterator[ParameterCopy]:
    """Yield the fp32 sums of a rank's shards of all gradients, and the flat copy of them that stage 3 updates with.

    DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py, _build_compact_grad_partition_buffer: the update reads them.
    stage3.py, _prepare_fp32_grad_for_sub_group: the update reads a copy.
    """
    name, role = " gradient, summed", Role.MASTER_GRADIENTS
    citation, mask = "DeepSpeed 0.19.8 runtime/zero/: gradient_accumulation_dtype", _gradient_mask(options)
    yield ParameterCopy(Component.GRADIENTS, name, "fp32", 2, mask, citation, gradient_shaped=True, role=role)
    if options.zero_stage == 3:
        name, citation = " gradient in fp32", "DeepSpeed 0.19 runtime/zero/stage3.py: _prepare_fp32_grad_for_sub_group"
        mask = mask_of("optimizer_step_1", "optimizer_step_2")
        yield ParameterCopy(Component.GRADIENTS, name, "fp32", 1, mask, citation, role=role)


def _main_gradients(options: StateOptions, dtype: str, gradients_from: int) -> Iterator[ParameterCopy]:
    recipe = RECIPES[options.recipe]
    mask = {
        "always": from_phase("optimizer"),
        "backward": _gradient_mask(options),
        "step": mask_of("optimizer_step_1", "optimizer_step_2"),
    }[recipe.main_gradients_live]
    sharded_from = 1 if recipe.main_gradients_live == "step" else gradients_from
    if options.gradients is not None:
        citation = "Megatron-LM --grad-reduce-in-bf16: gradients are summed in dtype"
        role = Role.SUMMED_GRADIENTS
        yield ParameterCopy(
            Component.GRADIENTS, " main gradient", options.gradients, sharded_from, mask, citation, role=role
        )
        mask, sharded_from = mask_of("optimizer_step_1", "optimizer_step_2"), 1
    citation = f"recipe {options.recipe} ({recipe.imitates}): an fp32 copy of the gradients"
    made = recipe.main_gradients_live != "always"  # otherwise it has the parameter's layout
    role = Role.MASTER_GRADIENTS
    copy = ParameterCopy(
        Component.GRADIENTS, " gradient in fp32", dtype, sharded_from, mask, citation, gradient_shaped=made, role=role
    )
    if recipe.main_gradients_live != "backward":
        yield copy
    elif options.step.sums_unsharded:
        yield _after_the_last(copy, options)
    else:
        yield from _whole_until_reduced(copy, options)


def _whole_until_reduced(copy: ParameterCopy, options: StateOptions) -> Iterator[ParameterCopy]:
    """Yield the unsharded gradients of DeepSpeed's stage 1 until backward ends, and the shard afterwards.

    Stage 1 accumulates micro-batches in unsharded gradients and reduces them after the last one (DeepSpeed 0.19
    runtime/zero/stage_1_and_2.py, process_gradients and reduce_gradients).
    """
    passes = copy.mask & PASSES
    if not options.reduces_after_backward or not passes:
        yield copy
        return
    yield copy._replace(name=copy.name.replace("gradient", "whole gradient"), mask=passes, sharded_from_stage=2)
    yield copy._replace(mask=copy.mask & ~PASSES)


def _unsharded_sums(copy: ParameterCopy, options: StateOptions, *, with_shards: bool) -> Iterator[ParameterCopy]:
    """Yield the unsharded sums of FSDP2 without gradient sync, and the shards after the last micro-batch.

    torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param.py, to_accumulated_grad_if_needed. The last backward frees the
    sums unit by unit; they are counted until it ends.
    """
    name = copy.name.replace("gradient", "unsharded gradient")
    yield copy._replace(name=name, dtype=options.summed, mask=copy.mask & PASSES, sharded_from_stage=NEVER)
    if with_shards:
        yield _after_the_last(copy, options)


def _after_the_last(copy: ParameterCopy, options: StateOptions) -> ParameterCopy:
    """Return gradient shards that only exist after the last micro-batch, unless they are zeroed in place."""
    return copy if options.step.zeroes_gradients else copy._replace(mask=copy.mask & ~PASSES)


def _gradient_mask(options: StateOptions) -> int:
    """Return the phases in which all gradients are live: optimizer step, next zero_grad, and between them if kept.

    The backward that produces them is evaluated event by event, unless they exist before it starts.
    """
    if options.step.updates_in_backward:
        return 0
    if options.partitions_gradients and options.zero_stage == 3:
        return from_phase("optimizer")  # stage3.py: one flat buffer of the rank's shard, allocated once
    mask = 0 if options.frees_gradients_before_update else mask_of("optimizer_step_1", "optimizer_step_2")
    if not options.frees_gradients_in_step:
        mask |= mask_of("zero_grad_2")
    if options.step.accumulates:
        mask |= mask_of("forward_1", "loss_1", "backward_1", "forward_2", "loss_2", "backward_2")
    if options.step.zeroes_gradients and not options.frees_gradients_in_step:
        mask |= mask_of("forward_2", "loss_2", "backward_2")
    if options.step.zeroes_gradients_before_backward and not options.frees_gradients_in_step:
        mask |= mask_of("forward_2", "loss_2")
    return mask


def gradients_exist(options: StateOptions, step: int) -> bool:
    """Return whether all gradients exist before the (last micro-batch's) backward of a step starts."""
    return bool(_gradient_mask(options) & BIT[f"backward_{step}"])


def is_made_in_backward(copy: ParameterCopy, options: StateOptions) -> bool:
    """Return whether a copy is of gradients that this backward allocates."""
    made = {Role.GRADIENTS}
    if RECIPES[options.recipe].main_gradients_live == "backward":
        made.add(Role.MASTER_GRADIENTS)
    if copy.role in made and options.step.sums_unsharded:
        return True
    return copy.component is Component.GRADIENTS and copy.mask == _gradient_mask(options)


def is_on_host(copy: ParameterCopy, options: StateOptions) -> bool:
    """Return whether a copy of the parameters is in host memory: the optimizer's copies, the weights, or all."""
    if copy.component is Component.WEIGHTS:
        return options.host.has_weights
    if options.sums_shards and options.zero_stage == 2 and copy.component is Component.GRADIENTS:
        return False
    updated = (Component.MASTER_WEIGHTS, Component.GRADIENTS)
    return options.host.offloads and (options.host.has_weights or copy.component in updated)


AVERAGED_MODEL = "torch 2.13 optim/swa_utils.py, AveragedModel: a copy of the model"
FP32 = "memcalc/step/ema.py: an fp32 copy of what the optimizer updates"


def average(average_type: str, weights: str, sharded_from: int) -> Iterator[ParameterCopy]:
    """Yield the averaged copy: sharded as the weights, or in fp32 and sharded as the fp32 master weights."""
    mask = from_phase("optimizer")
    if average_type == "weights":
        yield ParameterCopy(
            Component.OPTIMIZER_STATE, " average", weights, sharded_from, mask, AVERAGED_MODEL, role=Role.AVERAGE
        )
    elif average_type == "fp32":
        yield ParameterCopy(Component.OPTIMIZER_STATE, " average", "fp32", 1, mask, FP32, role=Role.AVERAGE)
