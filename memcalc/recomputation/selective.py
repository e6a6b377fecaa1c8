"""Plans inside a layer (selective checkpointing): recomputed layers, and the operators with results that they save."""

from __future__ import annotations

from memcalc.errors import InputError
from memcalc.recomputation.config_chain import ConfigChain, chain_of
from memcalc.recomputation.evaluation import evaluate
from memcalc.recomputation.plan import Plan, segmented
from memcalc.recomputation.search import Proposal
from memcalc.recomputation.strategies.every_layer import every_layer
from memcalc.recomputation.strategies.optimal import OptimalPlan
from memcalc.recomputation.strategies.selective import Product, choose
from memcalc.spec.matmuls import layer_matmuls, saves_matmuls
from memcalc.spec.spec import Spec

TRIES = 12  # corrections of the budget, each by the excess of a plan's allocated memory


class Selective:
    """Plans inside the layers of one run.

    The integer program counts memory at the end of forward. The memory of a layer's own backward is not linear, so each
    plan is evaluated, and its excess is subtracted from the next one's budget.

    Args:
        spec: the run.

    Raises:
        InputError: the operators of the layers are not modelled separately.
    """

    def __init__(self, spec: Spec) -> None:
        if why := saves_matmuls(spec):
            raise InputError(
                f"strategy = selective saves results of single operators, but {why}.",
                "Use --strategy optimal.",
                "--strategy",
            )
        self._base = base = chain_of(spec, ())
        self._products = _products(base)
        every = evaluate(base.chain, every_layer(base.chain), record=True)
        # Memory of the LM head if only the inputs of layers are saved.
        self._head = max(moment.bytes for moment in every.points if moment.position == len(base.chain) - 1)

    def cheapest_plan(self, budget: int) -> Proposal | None:
        """Return the cheapest plan found within `budget` allocated bytes; None: there is none.

        Raises:
            Unavailable: SciPy is missing.
        """
        base, room = self._base, budget - self._head
        block = base.chain.blocks[base.first]
        for _ in range(TRIES):
            choice = choose(
                base.stop - base.first, block.inside_bytes, block.recompute_flops or 0, self._products, room
            )
            if choice is None:
                return None
            configured = chain_of(base.spec, choice.saved_operators)
            again = range(configured.first, configured.first + choice.recomputed)
            items = segmented(len(configured.chain), ((b, b + 1) for b in again))
            found = OptimalPlan(Plan(items, "selective"), evaluate(configured.chain, items), None)
            excess = found.evaluation.peak_bytes - budget
            if excess <= 0:
                return Proposal(configured, found, choice.saved_operators)
            room -= excess
        return None


def _products(base: ConfigChain) -> list[Product]:
    """Return the bytes and the FLOPs saved by keeping each operator's result."""
    names = layer_matmuls(base.spec.model, base.spec.training)
    bare = base.chain.blocks[base.first].recompute_flops or 0
    found = {name: chain_of(base.spec, (name,)).chain.blocks[base.first] for name in names}
    return [
        Product(name, block.released_late_bytes, bare - (block.recompute_flops or 0)) for name, block in found.items()
    ]
