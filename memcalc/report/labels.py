"""Labels and letters that all reports share."""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.ledger.component import Component

# What several small parts are together, where a table has few rows.
REST = "smaller_parts"

# The letter of each part in the bar, its color, and what it is in a few words. The colors are those of a terminal with
# 256 with a contrast of at least 3 to black and to white (WCAG 2.2, 1.4.11).
_PARTS: dict[str, tuple[str, str, str]] = {
    Component.WEIGHTS: ("W", "color(27)", "used by forward and backward"),
    Component.MASTER_WEIGHTS: ("M", "color(30)", "fp32 copies for the optimizer"),
    Component.GRADIENTS: ("G", "color(28)", "of parameters, all copies"),
    Component.OPTIMIZER_STATE: ("O", "color(127)", "for example Adam moments"),
    Component.ACTIVATIONS: ("A", "color(136)", "saved for backward"),
    Component.KV_CACHE: ("V", "color(64)", "keys and values of all tokens so far"),
    Component.LOGITS_AND_LOSS: ("L", "color(160)", "from the final norm to the loss"),
    Component.INPUTS: ("I", "color(101)", "token ids and labels"),
    Component.TEMPORARIES: ("T", "color(166)", "allocated and freed within the phase"),
    Component.COMMUNICATION_BUFFERS: ("C", "color(67)", "all-gather, reduce-scatter, DDP buckets"),
    Component.LIBRARY_WORKSPACE: ("K", "color(98)", "cuBLAS and other libraries"),
    Component.BLOCK_ROUNDING: ("R", "color(244)", "allocated minus requested bytes"),
    REST: ("+", "color(244)", "inputs, workspaces and the like"),
    "cached_segments": ("s", "color(244)", "reserved, not allocated"),
    "device_context": ("x", "color(244)", "CUDA context and loaded kernels"),
    "communication_library": ("n", "color(244)", "NCCL buffers"),
}

_STYLES = {letter: style for letter, style, _ in _PARTS.values()}

HEADROOM = "."
FACTOR = 10  # from here on a growth is reported as a factor


def letter(part: str) -> str:
    """Return the letter of a component, or of memory outside the allocated blocks."""
    return _PARTS[part][0]


def meaning(part: str) -> str:
    """Return the description of a part."""
    return _PARTS[part][2]


def letter_style(mark: str) -> str:
    """Return the color of a letter; the letter alone is unambiguous."""
    return _STYLES.get(mark, "")


def label(part: str) -> str:
    """Return a name as text: "optimizer state" for "optimizer_state"."""
    return part.replace("_", " ")


def percent(part: int, whole: int) -> str:
    """Return a percentage with one decimal, "41.7%"; "<0.1%" for a tiny part."""
    if whole <= 0:
        return "-"
    share = 100 * part / whole
    return "<0.1%" if 0 < share < 0.05 else f"{share:.1f}%"


def signed_percent(difference: int, base: int) -> str:
    """Return a difference relative to its base, with its sign: "+12.50%"; from FACTOR times the base on "×10"."""
    if base and difference + base >= FACTOR * base:
        return f"×{(difference + base) / base:,.0f}"
    return "-" if base == 0 else f"{100 * difference / base:+.2f}%"


def count(number: int) -> str:
    """Return a number of parameters: "174.60 B", "124.44 M"."""
    for size, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:,.2f} {suffix}"
    return f"{number:,}"


def ratio(value: float) -> str:
    """Return a ratio with two or three significant digits: 0.79, 4.2, 101."""
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def listed(texts: Sequence[str], most: int = 3) -> str:
    """Return the first texts, and how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return "; ".join(texts[:most]) + more


def rank_text(rank: dict[str, int]) -> str:
    """Return the position of a rank: "pipeline stage 0"; empty if all ranks are identical."""
    return ", ".join(f"{label(axis)} {index}" for axis, index in rank.items())


def plural(number: int, noun: str) -> str:
    """ "1 file", "2 files"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


_NAMED = 12  # in one note of a screen


def shortened(note: str) -> str:
    """Return a note with a long list of names shortened. The JSON has all names."""
    head, colon, names = note.partition(": ")
    several = names.split(", ")
    if not colon or len(several) <= _NAMED or any(" " in name for name in several):
        return note
    return f"{head}: {', '.join(several[:_NAMED])} and {len(several) - _NAMED} more."
