"""Host memory under FSDP2's CPUOffloadPolicy: a rank's shards of weights and gradients, and the optimizer update.

torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param.py, reset_sharded_param: shards are pinned if the policy sets it.
_fsdp_collectives.py, foreach_reduce: a reduced gradient is copied into pinned memory, unless something on the host
waits for it (a sum that it is added to, a hook). The optimizer's tensors are pageable.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

from memcalc.estimation.choice import Choice
from memcalc.estimation.copies import Role, copy_item
from memcalc.estimation.items import Item, mask_of
from memcalc.estimation.optimizers.states import optimizer_states
from memcalc.estimation.recipe_copies import is_made_in_backward, kept_copies
from memcalc.estimation.sharding import Parameters
from memcalc.estimation.stepping import step_items
from memcalc.ledger.component import Component
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES

SOURCE = "torch 2.13 distributed/fsdp/_fully_shard/_fsdp_collectives.py"

BACKWARD = mask_of("backward_1", "backward_2")


def held(parameters: Parameters, choice: Choice, *, trains: bool) -> tuple[list[Item], list[Item]]:
    """Return what is in pinned memory and what in pageable memory, for parameters with identical options."""
    # such a hook reads each gradient at once
    hooks = RECIPES[choice.recipe].main_gradients_live in ("always", "backward")
    pinned: list[Item] = []
    pageable: list[Item] = []
    for copy in kept_copies(choice, trains=trains):
        if is_made_in_backward(copy, choice):
            copy = copy._replace(mask=copy.mask | BACKWARD)  # noqa: PLW2901 -- the same copy, earlier
        items = [copy_item(copy, each, choice.spread(copy.sharded_from_stage)) for each in parameters]
        fetched = copy.role is Role.GRADIENTS and not hooks
        locked = choice.pins and (copy.component is Component.WEIGHTS or fetched)
        (pinned if locked else pageable).extend(items)
    if trains:
        states = list(optimizer_states(parameters, choice.update, choice.spread(1)))
        pageable += step_items(parameters, choice, states)
        if added := _on_their_way(parameters, choice):
            pageable.append(added)
    return pinned, pageable


def _on_their_way(parameters: Parameters, choice: Choice) -> Item | None:
    """Return gradients that are added to others once copied, one parameter at a time; None if there are none.

    torch 2.13 _fsdp_collectives.py, foreach_reduce: new_sharded_grad is freed before the next one is created. As .grad
    of a parameter that its hook frees, a second variable, new_sharded_dtensor_grad, references it, and it is freed
    after.
    """
    dropped = RECIPES[choice.recipe].gradients is None
    if not dropped and not choice.accumulates:
        return None
    units: dict[str, list[int]] = {}
    for each in parameters:  # the root's are reduced together, too
        unit = each.module.partition("*")[0] if each.where == "layer" else ""
        units.setdefault(unit, []).append(DTYPE_BYTES[choice.base] * prod(choice.spread(2).shape(each)))
    pairs = [pair for sizes in units.values() for pair in pairwise([0, *sizes])]
    size = max(sum(pair) if dropped else max(pair) for pair in pairs)
    name, symbol = "gradients in transfer", "(P_matrix+P_matrix)/N" if dropped else "P_matrix/N"
    formula, shape = f"{DTYPE_BYTES[choice.base]}·{symbol}", (size // DTYPE_BYTES[choice.base],)
    kind, citation = Component.GRADIENTS, f"{SOURCE}: foreach_reduce"
    return Item(kind, "engine", name, shape, choice.base, 1, size, size, BACKWARD, formula, citation)
