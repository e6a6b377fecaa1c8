"""One color for each component, the same in every picture.

Paul Tol's "muted" scheme, which color-blind readers can distinguish, and grays for memory without tensors.
Source: https://personal.sron.nl/~pault/data/colourschemes.pdf, section 2.
"""

from __future__ import annotations

from memcalc.ledger.component import Component
from memcalc.report.labels import label, letter

_COLORS: dict[Component | None, str] = {
    Component.WEIGHTS: "#332288",
    Component.MASTER_WEIGHTS: "#88CCEE",
    Component.GRADIENTS: "#117733",
    Component.OPTIMIZER_STATE: "#AA4499",
    Component.ACTIVATIONS: "#DDCC77",
    Component.KV_CACHE: "#8822EE",  # not in the scheme: as different from its colors as possible
    Component.LOGITS_AND_LOSS: "#CC6677",
    Component.INPUTS: "#999933",
    Component.TEMPORARIES: "#44AA99",
    Component.COMMUNICATION_BUFFERS: "#882255",
    Component.LIBRARY_WORKSPACE: "#222222",
    Component.BLOCK_ROUNDING: "#BBBBBB",
    None: "#EEEEEE",
}

RESERVED = "#000000"
LIMIT = "#CC0000"
GREY = "#555555"  # axes and their labels
OUTSIDE = "#9a9a9a"  # what PyTorch's allocator does not count
UNATTRIBUTED = "unattributed"


def color(component: Component | None) -> str:
    """Return the color as #RRGGBB; None is memory without a component."""
    return _COLORS[component]


def name(component: Component | None) -> str:
    """Return a component's name for people: spaces instead of underscores."""
    return UNATTRIBUTED if component is None else label(component)


def mark(component: Component | None) -> str:
    """Its letter in the terminal."""
    return "?" if component is None else letter(component)
