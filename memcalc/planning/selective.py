"""Plans inside a layer: which layers are recomputed, and which of their operators' results are kept all the same."""

from __future__ import annotations

from memcalc.errors import InputError
from memcalc.ledger.result import Result
from memcalc.planning.configured import Configured, chain_of, with_recompute
from memcalc.planning.evaluation import evaluate
from memcalc.planning.plan import Plan, segmented
from memcalc.planning.strategies.every_layer import every_layer
from memcalc.planning.strategies.optimal import Found
from memcalc.planning.strategies.selective import Product, choose
from memcalc.rehearsal.rehearsal import estimate_rehearsed
from memcalc.spec.products import keeps_products, layer_products
from memcalc.spec.spec import Spec

TRIES = 12  # corrections of the room, each by what a rehearsal found in excess


def plan_selective(spec: Spec, budget: int) -> tuple[Configured, Found, tuple[str, ...], Result] | None:
    """The cheapest plan found: its chain of layers, the plan, what is kept, its rehearsal. None: nothing fits.

    The integer programme counts what is held when forward has ended. What a layer's own backward takes beside it is
    not linear: a plan is rehearsed, and what it has in excess comes off the room of the next one.

    Args:
        spec: the run.
        budget: bytes that may be allocated.

    Raises:
        InputError: the layers' operators cannot be told apart.
        Unavailable: SciPy is missing.
    """
    if why := keeps_products(spec):
        raise InputError(
            f"strategy = selective keeps single operators' results, but {why}.", "Use --strategy optimal.", "--strategy"
        )
    base = chain_of(spec, ())
    layers = base.stop - base.first
    block, products = base.chain.blocks[base.first], _products(base)
    every = evaluate(base.chain, every_layer(base.chain), record=True)
    room = budget - max(moment.bytes for moment in every.moments if moment.position == len(base.chain) - 1)
    for _ in range(TRIES):
        choice = choose(layers, block.inside_bytes, block.again_flops or 0, products, room)
        if choice is None:
            return None
        configured = chain_of(spec, choice.keep)
        again = range(configured.first, configured.first + choice.recomputed)
        items = segmented(len(configured.chain), ((b, b + 1) for b in again))
        planned = with_recompute(configured.spec, configured.recompute(items), choice.keep)
        result = estimate_rehearsed(planned)
        excess = result.ledger.peak_bytes - budget
        if excess <= 0:
            found = Found(Plan(items, "selective"), evaluate(configured.chain, items), None)
            return configured, found, choice.keep, result
        room -= excess
    return None


def _products(base: Configured) -> list[Product]:
    """What keeping each operator's result takes and spares."""
    names = layer_products(base.spec.model, base.spec.training)
    bare = base.chain.blocks[base.first].again_flops or 0
    found = {name: chain_of(base.spec, (name,)).chain.blocks[base.first] for name in names}
    return [Product(name, block.stays_bytes, bare - (block.again_flops or 0)) for name, block in found.items()]
