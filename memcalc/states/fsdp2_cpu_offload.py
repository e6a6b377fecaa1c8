"""Host memory under FSDP2's CPUOffloadPolicy: a rank's shards of weights and gradients, and the optimizer update.

torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param.py, reset_sharded_param: shards are pinned if the policy sets it.
_fsdp_collectives.py, foreach_reduce: a reduced gradient is copied into pinned memory, unless something on the host
waits for it (a sum that it is added to, a hook). The optimizer's tensors are pageable.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

from memcalc.layout.local_parameters import LocalParameters
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, mask_of
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES
from memcalc.states.optimizer_step import optimizer_step_rows
from memcalc.states.optimizers.optimizer_states import optimizer_states
from memcalc.states.parameter_copies import Role, copy_row
from memcalc.states.recipe_copies import is_made_in_backward, kept_copies
from memcalc.states.state_options import StateOptions

SOURCE = "torch 2.13 distributed/fsdp/_fully_shard/_fsdp_collectives.py"

BACKWARD = mask_of("backward_1", "backward_2")


def offloaded_states(
    parameters: LocalParameters, options: StateOptions, *, trains: bool
) -> tuple[list[RowDraft], list[RowDraft]]:
    """Return what is in pinned memory and what in pageable memory, for parameters with identical options."""
    # such a hook reads each gradient at once
    hooks = RECIPES[options.recipe].main_gradients_live in ("always", "backward")
    pinned: list[RowDraft] = []
    pageable: list[RowDraft] = []
    for copy in kept_copies(options, trains=trains):
        if is_made_in_backward(copy, options):
            copy = copy._replace(mask=copy.mask | BACKWARD)  # noqa: PLW2901 -- the same copy, earlier
        items = [copy_row(copy, each, options.spread(copy.sharded_from_stage)) for each in parameters]
        fetched = copy.role is Role.GRADIENTS and not hooks
        locked = options.host.pins and (copy.component is Component.WEIGHTS or fetched)
        (pinned if locked else pageable).extend(items)
    if trains:
        states = list(optimizer_states(parameters, options.update, options.spread(1)))
        pageable += optimizer_step_rows(parameters, options, states)
        if added := _on_their_way(parameters, options):
            pageable.append(added)
    return pinned, pageable


def _on_their_way(parameters: LocalParameters, options: StateOptions) -> RowDraft | None:
    """Return gradients that are added to others once copied, one parameter at a time; None if there are none.

    torch 2.13 _fsdp_collectives.py, foreach_reduce: new_sharded_grad is freed before the next one is created. As .grad
    of a parameter that its hook frees, a second variable, new_sharded_dtensor_grad, references it, and it is freed
    after.
    """
    dropped = RECIPES[options.recipe].gradients is None
    if not dropped and not options.step.accumulates:
        return None
    units: dict[str, list[int]] = {}
    for each in parameters:  # the root's are reduced together, too
        unit = each.module.partition("*")[0] if each.where == "layer" else ""
        units.setdefault(unit, []).append(DTYPE_BYTES[options.base] * prod(options.spread(2).shape(each)))
    pairs = [pair for sizes in units.values() for pair in pairwise([0, *sizes])]
    size = max(sum(pair) if dropped else max(pair) for pair in pairs)
    name, symbol = "gradients in transfer", "(P_matrix+P_matrix)/N" if dropped else "P_matrix/N"
    formula, shape = f"{DTYPE_BYTES[options.base]}·{symbol}", (size // DTYPE_BYTES[options.base],)
    kind, citation = Component.GRADIENTS, f"{SOURCE}: foreach_reduce"
    return RowDraft(kind, "engine", name, shape, options.base, 1, size, size, BACKWARD, formula, citation)
