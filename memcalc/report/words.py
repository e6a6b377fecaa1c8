"""The words and letters that all reports share."""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.ledger.component import Component

# The letter of each part in the bar, its colour, and what it is in a few words.
_PARTS: dict[str, tuple[str, str, str]] = {
    Component.WEIGHTS: ("W", "blue", "what forward and backward read"),
    Component.MASTER_WEIGHTS: ("M", "cyan", "fp32 copies the optimizer updates"),
    Component.GRADIENTS: ("G", "green", "of parameters, every copy of them"),
    Component.OPTIMIZER_STATE: ("O", "magenta", "what the update rule remembers"),
    Component.ACTIVATIONS: ("A", "yellow", "what the layers save for backward"),
    Component.KV_CACHE: ("V", "bright_green", "keys and values of the tokens so far"),
    Component.LOGITS_AND_LOSS: ("L", "red", "from the last norm to the loss"),
    Component.INPUTS: ("I", "white", "token ids and labels"),
    Component.TEMPORARIES: ("T", "bright_yellow", "made and freed inside the phase"),
    Component.COMMUNICATION_BUFFERS: ("C", "bright_blue", "gathered shards, prefetch, buckets"),
    Component.LIBRARY_WORKSPACE: ("K", "bright_magenta", "scratch space of cuBLAS and the like"),
    Component.BLOCK_ROUNDING: ("R", "bright_black", "what the allocator adds to requests"),
    "cached_segments": ("s", "bright_black", "reserved by PyTorch, not in use"),
    "device_context": ("x", "bright_black", "CUDA context and loaded kernels"),
    "communication_library": ("n", "bright_black", "NCCL's own buffers"),
}

_STYLES = {letter: style for letter, style, _ in _PARTS.values()}

HEADROOM = "."


def letter(part: str) -> str:
    """The bar's letter for a component, or for memory outside allocated blocks."""
    return _PARTS[part][0]


def meaning(part: str) -> str:
    """What a part is, in a few words."""
    return _PARTS[part][2]


def letter_style(mark: str) -> str:
    """The colour of a letter; the letter alone says as much."""
    return _STYLES.get(mark, "")


def label(part: str) -> str:
    """ "optimizer_state" as people write it."""
    return part.replace("_", " ")


def percent(part: int, whole: int) -> str:
    """A share with one decimal: "41.7%"; a part too small to show is "<0.1%"."""
    if whole <= 0:
        return "-"
    share = 100 * part / whole
    return "<0.1%" if 0 < share < 0.05 else f"{share:.1f}%"


def signed_percent(difference: int, base: int) -> str:
    """A difference as a share of its base, with its sign."""
    return "-" if base == 0 else f"{100 * difference / base:+.2f}%"


def count(number: int) -> str:
    """Elements as models are called by: 174.60 B, 124.44 M."""
    for size, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:,.2f} {suffix}"
    return f"{number:,}"


def ratio(value: float) -> str:
    """A ratio in the digits that matter: 0.79, 4.2, 101."""
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def listed(texts: Sequence[str], most: int = 3) -> str:
    """The first texts, and how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return "; ".join(texts[:most]) + more


def rank_text(rank: dict[str, int]) -> str:
    """Which kind of rank: "pipeline stage 0"; empty where all ranks are alike."""
    return ", ".join(f"{label(axis)} {index}" for axis, index in rank.items())


def plural(number: int, noun: str) -> str:
    """ "1 file", "2 files"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


_NAMED = 12  # in one note of a screen


def shortened(note: str) -> str:
    """A note for a screen: of a long list of names the first ones. The JSON has all."""
    head, colon, names = note.partition(": ")
    several = names.split(", ")
    if not colon or len(several) <= _NAMED or any(" " in name for name in several):
        return note
    return f"{head}: {', '.join(several[:_NAMED])} and {len(several) - _NAMED} more."
