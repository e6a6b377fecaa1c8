"""What FSDP2's CPUOffloadPolicy has on the host: a rank's shards of the weights, their gradients, and the update.

torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param.py, reset_sharded_param: shards are pinned as the policy says.
_fsdp_collectives.py, foreach_reduce: a reduced gradient is copied into pinned memory, unless something on the host
waits for it (a sum that it is added to, a hook). What the optimizer makes is as pageable as all that Python makes.
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
    """What lies in pinned memory, and what in any; of parameters that are held alike."""
    hooks = RECIPES[choice.recipe].main_gradients_live in ("always", "backward")  # they read each gradient at once
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
    """What is added to other gradients when it has arrived, one parameter after the other; None where nothing is.

    torch 2.13 _fsdp_collectives.py, foreach_reduce: new_sharded_grad goes before the next one comes; as .grad of a
    parameter whose hook drops it, it has another name, new_sharded_dtensor_grad, and goes after.
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
    name, symbol = "gradients on their way", "(P_matrix+P_matrix)/N" if dropped else "P_matrix/N"
    formula, shape = f"{DTYPE_BYTES[choice.base]}·{symbol}", (size // DTYPE_BYTES[choice.base],)
    kind, citation = Component.GRADIENTS, f"{SOURCE}: foreach_reduce"
    return Item(kind, "engine", name, shape, choice.base, 1, size, size, BACKWARD, formula, citation)
