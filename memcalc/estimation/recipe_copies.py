"""Copies of the parameters that a recipe keeps (memcalc/spec/recipes.py), and a moving average."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.estimation.choice import Choice
from memcalc.estimation.copies import Copy, Role
from memcalc.estimation.items import BIT, from_phase, mask_of
from memcalc.estimation.optimizers.averages import average
from memcalc.ledger.component import Component
from memcalc.spec.recipes import RECIPES

NEVER = 4  # beyond ZeRO's last stage: never sharded
PASSES = mask_of(*(f"{phase}_{step}" for phase in ("forward", "loss", "backward") for step in (1, 2)))
ZERO = "ZeRO (arXiv 1910.02054) section 3"


def kept_copies(choice: Choice, *, trains: bool) -> Iterator[Copy]:
    """Yield every copy of the parameters that is live in several phases; only the weights of frozen parameters."""
    # FSDP2 always shards weights: its stage 2 keeps gathered parameters from forward to backward.
    weights_from = 2 if choice.engine == "fsdp2" else 3
    citation = "the parameters that forward reads"
    made = "optimizer" if choice.late_adapters else "model"
    held_in = choice.held_in or choice.base
    yield Copy(Component.WEIGHTS, "", held_in, weights_from, from_phase(made), citation, role=Role.WEIGHTS)
    if choice.refers:
        citation = "the weights of a reference model (arXiv 2305.18290), loaded as the policy is"
        name = " of the reference model"
        yield Copy(Component.WEIGHTS, name, held_in, 3, from_phase("optimizer"), citation, role=Role.REFERENCE)
    if not trains:
        return
    recipe = RECIPES[choice.recipe]
    copied = choice.zero.copies_fp32_weights and choice.partitions_gradients and choice.zero_stage == 3
    if recipe.master is not None or (copied and choice.base == "fp32"):
        citation = f"{ZERO}.1: an fp32 copy that the optimizer updates"
        made = "input" if choice.masters_follow_flattening else "optimizer"
        phases, role = from_phase(made), Role.MASTER_WEIGHTS
        yield Copy(Component.MASTER_WEIGHTS, " master", recipe.master or "fp32", 1, phases, citation, role=role)
    # DeepSpeed's stage 1 reduces and frees them after backward
    gradients_from = 1 if choice.engine == "deepspeed" else 2
    if recipe.gradients is not None and not choice.updates_in_backward:  # then they are events of backward
        citation = "autograd: .grad, from backward to zero_grad"
        mask = _gradient_mask(choice)
        copy = Copy(
            Component.GRADIENTS,
            " gradient",
            choice.base,
            gradients_from,
            mask,
            citation,
            as_made=True,
            role=Role.GRADIENTS,
        )
        yield from _unsharded_sums(copy, choice) if choice.sums_unsharded else _whole_until_reduced(copy, choice)
    if recipe.main_gradients is not None:
        yield from _main_gradients(choice, recipe.main_gradients, gradients_from)
    yield from average(choice.ema, choice.base, weights_from)


def _main_gradients(choice: Choice, dtype: str, gradients_from: int) -> Iterator[Copy]:
    recipe = RECIPES[choice.recipe]
    mask = {
        "always": from_phase("optimizer"),
        "backward": _gradient_mask(choice),
        "step": mask_of("optimizer_step_1", "optimizer_step_2"),
    }[recipe.main_gradients_live]
    sharded_from = 1 if recipe.main_gradients_live == "step" else gradients_from
    if choice.gradients is not None:
        citation = "Megatron-LM --grad-reduce-in-bf16: gradients are summed in dtype"
        role = Role.SUMMED_GRADIENTS
        yield Copy(Component.GRADIENTS, " main gradient", choice.gradients, sharded_from, mask, citation, role=role)
        mask, sharded_from = mask_of("optimizer_step_1", "optimizer_step_2"), 1
    citation = f"recipe {choice.recipe} ({recipe.imitates}): an fp32 copy of the gradients"
    made = recipe.main_gradients_live != "always"  # otherwise it has the parameter's layout
    role = Role.MASTER_GRADIENTS
    copy = Copy(Component.GRADIENTS, " gradient in fp32", dtype, sharded_from, mask, citation, as_made=made, role=role)
    yield from _whole_until_reduced(copy, choice) if recipe.main_gradients_live == "backward" else (copy,)


def _whole_until_reduced(copy: Copy, choice: Choice) -> Iterator[Copy]:
    """Yield the unsharded gradients of DeepSpeed's stage 1 until backward ends, and the shard afterwards.

    Stage 1 accumulates micro-batches in unsharded gradients and reduces them after the last one (DeepSpeed 0.19
    runtime/zero/stage_1_and_2.py, process_gradients and reduce_gradients).
    """
    passes = copy.mask & PASSES
    if not choice.reduces_after_backward or not passes:
        yield copy
        return
    yield copy._replace(name=copy.name.replace("gradient", "whole gradient"), mask=passes, sharded_from_stage=2)
    yield copy._replace(mask=copy.mask & ~PASSES)


def _unsharded_sums(copy: Copy, choice: Choice) -> Iterator[Copy]:
    """Yield the unsharded sums of FSDP2 without gradient sync, and the shards after the last micro-batch.

    torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param.py, to_accumulated_grad_if_needed. The last backward frees the
    sums unit by unit; they are counted until it ends.
    """
    name = copy.name.replace("gradient", "unsharded gradient")
    yield copy._replace(name=name, dtype=choice.summed, mask=copy.mask & PASSES, sharded_from_stage=NEVER)
    yield copy if choice.zeroes_gradients else copy._replace(mask=copy.mask & ~PASSES)


def _gradient_mask(choice: Choice) -> int:
    """Return the phases in which all gradients are live: optimizer step, next zero_grad, and between them if kept.

    The backward that produces them is evaluated event by event (timeline.py), unless they exist before it starts.
    """
    if choice.updates_in_backward:
        return 0
    if choice.partitions_gradients and choice.zero_stage == 3:
        return from_phase("optimizer")  # stage3.py: one flat buffer of the rank's shard, allocated once
    mask = mask_of("optimizer_step_1", "optimizer_step_2")
    if not choice.partitions_gradients:  # DeepSpeed frees them at the end of its step
        mask |= mask_of("zero_grad_2")
    if choice.accumulates:
        mask |= mask_of("forward_1", "loss_1", "backward_1", "forward_2", "loss_2", "backward_2")
    if choice.zeroes_gradients and not choice.partitions_gradients:
        mask |= mask_of("forward_2", "loss_2", "backward_2")
    if choice.keeps_gradients_until_backward and not choice.partitions_gradients:
        mask |= mask_of("forward_2", "loss_2")
    return mask


def gradients_exist(choice: Choice, step: int) -> bool:
    """Return whether all gradients exist before the (last micro-batch's) backward of a step starts."""
    return bool(_gradient_mask(choice) & BIT[f"backward_{step}"])


def is_made_in_backward(copy: Copy, choice: Choice) -> bool:
    """Return whether a copy is of gradients that this backward allocates (timeline.py)."""
    if copy.role is Role.GRADIENTS and choice.sums_unsharded:
        return True
    return copy.component is Component.GRADIENTS and copy.mask == _gradient_mask(choice)
