"""Plans inside a layer: which layers are recomputed, and which of their operators' results are kept all the same."""

from __future__ import annotations

from memcalc.errors import InputError
from memcalc.planning.configured import Configured, chain_of
from memcalc.planning.evaluation import evaluate
from memcalc.planning.plan import Plan, segmented
from memcalc.planning.search import Proposal
from memcalc.planning.strategies.every_layer import every_layer
from memcalc.planning.strategies.optimal import Found
from memcalc.planning.strategies.selective import Product, choose
from memcalc.spec.products import keeps_products, layer_products
from memcalc.spec.spec import Spec

TRIES = 12  # corrections of the room, each by what a plan allocates in excess


class Selective:
    """Plans inside the layers of one run.

    The integer program counts what is held when forward has ended. What a layer's own backward takes in addition is
    not linear: the plan is evaluated, and what it has in excess comes off the room of the next one.

    Args:
        spec: the run.

    Raises:
        InputError: the layers' operators cannot be told apart.
    """

    def __init__(self, spec: Spec) -> None:
        if why := keeps_products(spec):
            raise InputError(
                f"strategy = selective saves results of single operators, but {why}.",
                "Use --strategy optimal.",
                "--strategy",
            )
        self._base = base = chain_of(spec, ())
        self._products = _products(base)
        every = evaluate(base.chain, every_layer(base.chain), record=True)
        # What the head needs with nothing but inputs of layers kept.
        self._head = max(moment.bytes for moment in every.moments if moment.position == len(base.chain) - 1)

    def ask(self, budget: int) -> Proposal | None:
        """The cheapest plan found that allocates no more than this; None: there is none.

        Raises:
            Unavailable: SciPy is missing.
        """
        base, room = self._base, budget - self._head
        block = base.chain.blocks[base.first]
        for _ in range(TRIES):
            choice = choose(base.stop - base.first, block.inside_bytes, block.again_flops or 0, self._products, room)
            if choice is None:
                return None
            configured = chain_of(base.spec, choice.keep)
            again = range(configured.first, configured.first + choice.recomputed)
            items = segmented(len(configured.chain), ((b, b + 1) for b in again))
            found = Found(Plan(items, "selective"), evaluate(configured.chain, items), None)
            excess = found.evaluation.peak_bytes - budget
            if excess <= 0:
                return Proposal(configured, found, choice.keep)
            room -= excess
        return None


def _products(base: Configured) -> list[Product]:
    """What keeping each operator's result takes and spares."""
    names = layer_products(base.spec.model, base.spec.training)
    bare = base.chain.blocks[base.first].again_flops or 0
    found = {name: chain_of(base.spec, (name,)).chain.blocks[base.first] for name in names}
    return [Product(name, block.stays_bytes, bare - (block.again_flops or 0)) for name, block in found.items()]
