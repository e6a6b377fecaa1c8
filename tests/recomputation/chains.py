"""Chains for tests, and all plans of a chain, written down one by one."""

from collections.abc import Iterator

from hypothesis import strategies as st

from memcalc.recomputation.chain import Chain, ChainBlock
from memcalc.recomputation.evaluation import evaluate
from memcalc.recomputation.plan import Segment


@st.composite
def random_chains(draw: st.DrawFn, most: int, largest: int = 1000) -> Chain:
    """Any chain of up to so many blocks: sizes, tops and what lies beside are all free."""
    count = draw(st.integers(1, most))
    size = st.integers(0, largest)
    little = st.integers(0, largest // 4)
    boundaries = draw(st.lists(size, min_size=count + 1, max_size=count + 1))
    blocks = []
    for index in range(count):
        before, after, inside = boundaries[index], boundaries[index + 1], draw(size)
        backward = before + inside + after + draw(little)
        block = ChainBlock(
            f"block {index}",
            before,
            inside,
            after,
            draw(st.integers(0, 20)),
            draw(little),
            forward_top=before + inside + after + draw(little),
            bare_top=before + after + draw(little),
            backward_top=backward,
            rerun_top=max(backward - draw(little), 0),
            recompute_top=max(backward, before + inside + draw(little)),
            recomputable=draw(st.integers(0, 5)) > 0,
        )
        blocks.append(block)
    beside = st.lists(little, min_size=count, max_size=count).map(tuple)
    borders = draw(st.sets(st.integers(1, count), max_size=2)) if draw(st.booleans()) else set()
    return Chain(tuple(blocks), draw(size), draw(beside), draw(beside), frozenset(borders), draw(size))


def all_plans(chain: Chain) -> Iterator[Segment]:
    """Every plan: what is kept, what runs again together, and what runs again inside of that."""
    return _plans(chain, 0, len(chain) - 1)


def _plans(chain: Chain, first: int, last: int) -> Iterator[Segment]:
    if first == last:
        yield (first,)
        return
    for rest in _plans(chain, first + 1, last):
        yield (first, *rest)
    for stop in range(first + 1, last + 1):
        together = range(first, stop)
        if not all(chain.blocks[i].recomputable for i in together) or any(i in chain.borders for i in together[1:]):
            break
        for inside in _plans(chain, first, stop - 1):
            for rest in _plans(chain, stop, last):
                yield (inside, *rest)


def brute_front(chain: Chain) -> list[tuple[int, int]]:
    """(peak, FLOPs again) of every plan that no other one beats, by rising peak."""
    prices = sorted({_price(chain, plan) for plan in all_plans(chain)})
    kept: list[tuple[int, int]] = []
    for price in prices:
        if not kept or price[1] < kept[-1][1]:
            kept.append(price)
    return kept


def _price(chain: Chain, plan: Segment) -> tuple[int, int]:
    evaluation = evaluate(chain, plan)
    return evaluation.peak_bytes, evaluation.recompute_flops


def uniform(layers: int, inside: int, boundary: int, flops: int = 1) -> Chain:
    """Layers that are alike, as Chen et al. count: held tensors and the gradient between two layers, and no more."""
    both = inside + boundary
    layer = ChainBlock("layer", boundary, inside, boundary, flops, 0, both, boundary, both, both, both + boundary)
    loss = ChainBlock(
        "loss", boundary, 0, 0, 0, 0, boundary, boundary, boundary, boundary, boundary, recomputable=False
    )
    return Chain((*(layer._replace(name=f"layer {i}") for i in range(layers)), loss))


def steps(length: int) -> Chain:
    """Equal steps as Revolve counts them: a state is 1 byte, and what a step's reversal takes is never kept.

    Beside the states that are kept there are the one a step starts from, the one it makes, and the gradient.
    """
    step = ChainBlock("step", 1, 1000, 1, 1, 0, 3, 1, 3, 3, 3)
    return Chain((*(step for _ in range(length - 1)), step._replace(recomputable=False)))
