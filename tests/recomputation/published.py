"""Two chains of the literature on gradient checkpointing: eight matmuls, and 64 branches of 22 layers.

The branches here read [b, 512], and nothing follows their concatenation but the loss; the network as it was published
is docs/examples/chains/branches.yaml.
"""

from memcalc.recomputation.chain import Chain, join, simple_block
from memcalc.recomputation.plan import Segment

BRANCHES, LAYERS, WIDTH, LAST = 64, 22, 512, 8
PARAMETERS = BRANCHES * ((LAYERS - 1) * WIDTH * WIDTH + WIDTH * LAST)


def eight_products() -> Chain:
    """x1 = x0 W1, ..., x8 = x7 W8, and a loss of x8; a tensor is a byte, and weights are left out."""
    products = [simple_block(f"product {i}", 1, 0, 1, 1) for i in range(1, 9)]
    return Chain((*products, simple_block("loss", 1, 0, 0, 0, recomputable=False)))


def branches(batch: int) -> Chain:
    """64 branches of 21 products of [batch, 512] and one of [batch, 8], concatenated; fp32, with Adam's two moments."""
    wide, narrow = 4 * batch * WIDTH, 4 * batch * LAST
    layers = [
        simple_block(f"layer {i}", wide, 0, wide, 2 * batch * WIDTH**2, left_bytes=4 * WIDTH**2)
        for i in range(1, LAYERS)
    ]
    layers.append(simple_block("layer 22", wide, 0, narrow, 2 * batch * WIDTH * LAST, left_bytes=4 * WIDTH * LAST))
    joined = BRANCHES * narrow
    concatenation = simple_block("concatenation", joined, 0, joined, 0, recomputable=False)
    loss = simple_block("loss", joined, 0, 0, 0, recomputable=False)
    weights_and_moments = (4 + 8) * PARAMETERS
    return join([layers] * BRANCHES, wide, (concatenation, loss), weights_and_moments)


def keeping(*outputs: int) -> Segment:
    """In each branch the outputs of these layers are kept, and what lies between runs again."""
    items: list[int | Segment] = []
    for branch in range(BRANCHES):
        start = 0
        for stop in (*outputs, LAYERS):
            items.append(tuple(range(branch * LAYERS + start, branch * LAYERS + stop)))
            start = stop
    return (*items, BRANCHES * LAYERS, BRANCHES * LAYERS + 1)
