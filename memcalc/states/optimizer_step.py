"""Memory of the optimizer step: optimizer states it creates, and the temporaries at its peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.gradient_order import first_rank_slice
from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import BIT, STEPS, RowDraft, mask_of
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.states.optimizers.optimizer_states import OptimizerState
from memcalc.states.optimizers.parameter_order import in_order
from memcalc.states.optimizers.step_temporaries import StepOptions, part_of, step_temporaries
from memcalc.states.parameter_copies import UNSHARDED
from memcalc.states.state_options import StateOptions

FP64 = 8  # bytes per element
SUB_GROUP = 1_000_000_000  # DeepSpeed 0.19 runtime/zero/config.py, sub_group_size: elements that are updated at once


def sub_group_of(parameters: LocalParameters, options: StateOptions) -> LocalParameter | None:
    """Return the largest part of a rank's shards that DeepSpeed's stage 3 updates at once; None: all of them.

    A sub-group ends with the parameter with which it has SUB_GROUP elements or more.
    Source: DeepSpeed 0.19 runtime/zero/stage3.py, _create_fp16_sub_groups.
    """
    if not options.partitions_gradients or options.zero_stage < 3 or options.host.offloads:
        return None
    if _share_of(parameters, options) <= SUB_GROUP:
        return None
    largest = elements = 0
    ordered = in_order(parameters, options.update.family)
    for share in (-(-parameter.elements // options.data_parallel) for parameter in ordered):
        elements = share if elements >= SUB_GROUP else elements + share
        largest = max(largest, elements)
    return LocalParameter("sub-group", "flat", (("sub-group", largest),), 1, "head")


def _share_of(parameters: LocalParameters, options: StateOptions) -> int:
    return -(-sum(parameter.count * parameter.elements for parameter in parameters) // options.data_parallel)


def optimizer_step_rows(
    parameters: LocalParameters, options: StateOptions, states: Sequence[OptimizerState]
) -> Iterator[RowDraft]:
    """Yield states and step temporaries; states created after the first step's peak appear later."""
    if options.step.updates_in_backward:  # the temporaries are events of backward
        yield from _states_of_each(states)
        return
    update = options.update
    made: dict[str, int] = {}
    for state in states:
        if not state.item.mask & BIT["optimizer"]:
            part = part_of(state.parameter, update)
            made[part] = made.get(part, 0) + state.item.block * state.item.count
    casts = options.step.ema == "fp32" and update.dtype != "fp32"
    group = sub_group_of(parameters, options)
    updated = parameters if group is None else LocalParameters((group,))
    spread = options.spread(1) if group is None else UNSHARDED
    highest = step_temporaries(updated, update, StepOptions(options.step.clips, casts, spread, options.card), made)
    for state in states:
        item = state.item
        late = part_of(state.parameter, update) not in highest.parts_with_states
        yield item._replace(mask=item.mask & ~BIT["optimizer_step_1"]) if late else item
    yield from highest.items
    temporaries = sum(item.count * item.block for item in highest.items) // STEPS
    if options.flattens_fp32_gradients:
        yield from _flattened(parameters, temporaries)
    if options.partitions_gradients and not options.host.offloads:
        yield from _before_update(parameters, options, temporaries)


def _states_of_each(states: Sequence[OptimizerState]) -> Iterator[RowDraft]:
    """Yield the states where each parameter has an optimizer for itself, and with it the maps of 8-bit states."""
    scales = sum(state.item.count for state in states if state.item.tensor.endswith("scales"))
    for state in states:
        shared = (
            state.parameter.module == "optimizer"
        )  # optimizers/states.py, shared_states: one map for each kind of scale
        yield state.item._replace(count=scales) if shared else state.item


def _flattened(parameters: LocalParameters, temporaries: int) -> Iterator[RowDraft]:
    """Yield the gradients in fp32 that are flattened into those of the update, beyond its temporaries, if positive."""
    count = sum(parameter.count for parameter in parameters)
    size = DTYPE_BYTES["fp32"] * sum(parameter.count * parameter.elements for parameter in parameters)
    beyond = size - temporaries if count > 1 else 0  # flattening does not copy a single tensor
    if beyond > 0:
        citation = "DeepSpeed 0.19 runtime/fp16/fused_optimizer.py: step"
        yield _beyond_update("gradients in fp32, before they are flattened", beyond, "4·P", citation)


def _beyond_update(name: str, size: int, formula: str, citation: str) -> RowDraft:
    mask, kind = mask_of("optimizer_step_1", "optimizer_step_2"), Component.TEMPORARIES
    name = f"{name}, beyond the update"
    return RowDraft(kind, "norm", name, (size,), "uint8", 1, size, rounded(size), mask, formula, citation)


def _before_update(parameters: LocalParameters, options: StateOptions, temporaries: int) -> Iterator[RowDraft]:
    """Yield the bytes that DeepSpeed holds before the update, beyond those of the update, if positive.

    Its fp32 gradients are cast from flattened 16-bit ones, which are freed when the update begins (DeepSpeed 0.19
    runtime/zero/stage_1_and_2.py, step; stage3.py, _prepare_fp32_grad_for_sub_group).
    """
    if options.sums_shards:
        yield from _before_fp32_update(parameters, options, temporaries)
        return
    part = sub_group_of(parameters, options)
    share = _share_of(parameters, options) if part is None else part.elements
    candidates = [(DTYPE_BYTES[options.compute] * share, "flattened gradients", "2·P/N")]
    if options.frees_gradients_before_update:
        touched, _ = first_rank_slice(parameters, options.data_parallel)
        both = DTYPE_BYTES[options.compute] * (touched + share)
        candidates = [(both, "gradients, also flattened", "2·(P_touched + P/N)")]
    if options.zero_stage < 3:
        candidates = candidates if options.compute != "fp32" else []  # which are the fp32 gradients themselves
        norm = _norm_bytes(parameters, options, share)
        candidates.append((norm, "norm of a gradient in fp64", "8·P_piece"))
    beyond, name, formula = max(candidates)
    beyond -= temporaries
    if beyond > 0:
        file = "stage3.py" if options.zero_stage == 3 else "stage_1_and_2.py"
        yield _beyond_update(name, beyond, formula, f"DeepSpeed 0.19 runtime/zero/{file}: step")


def _before_fp32_update(parameters: LocalParameters, options: StateOptions, temporaries: int) -> Iterator[RowDraft]:
    """Yield the norm of a gradient at stage 2, beyond the update's temporaries, if positive; gradients are fp32."""
    beyond = FP64 * first_rank_slice(parameters, options.data_parallel).piece - temporaries
    if options.zero_stage == 2 and beyond > 0:
        citation = "DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py: get_grad_norm_direct"
        yield _beyond_update("norm of a gradient in fp64", beyond, "8·P_piece", citation)


def _norm_bytes(parameters: LocalParameters, options: StateOptions, share: int) -> int:
    """Return the bytes of DeepSpeed's gradient norm beyond those of fp32 gradients.

    DeepSpeed 0.19 runtime/zero/stage_1_and_2.py: copy_grads_in_partition allocates full parameters, however small the
    rank's part of them. get_grad_norm_direct casts one slice at a time to fp64, before fp32 gradients and the update's
    temporaries exist.
    """
    touched, piece = first_rank_slice(parameters, options.data_parallel)
    counted = 0 if options.frees_gradients_before_update else share  # gradients
    return DTYPE_BYTES[options.base] * (touched - counted) + FP64 * piece - DTYPE_BYTES["fp32"] * share
