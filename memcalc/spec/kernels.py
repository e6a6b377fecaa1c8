"""What the kernels of a card depend on, also where none is named."""

from __future__ import annotations

from memcalc.spec.cards import Card
from memcalc.workspaces.multiprocessors import Multiprocessors

# Where no card is named, or one without CUDA: NVIDIA's A100.
DEFAULT_CAPABILITY = (8, 0)
DEFAULT_MULTIPROCESSORS = 108
DEFAULT_THREADS = 2048


def capability(card: Card | None) -> tuple[int, int]:
    """(major, minor) of CUDA."""
    return (card and card.compute_capability) or DEFAULT_CAPABILITY


def multiprocessors(card: Card | None) -> Multiprocessors:
    """What decides over the geometry of kernels."""
    return Multiprocessors(
        (card and card.multiprocessors) or DEFAULT_MULTIPROCESSORS,
        (card and card.max_threads_per_multiprocessor) or DEFAULT_THREADS,
        capability(card)[0],
    )


def card_omissions(card: Card | None) -> tuple[str, ...]:
    """What memcalc does not know of a card's kernels."""
    if card is None or card.compute_capability is not None:
        return ()
    return (f"kernels of the {card.label} and their workspaces: assumed to be those of CUDA on an A100",)


# FlashAttention-2's kernels, and PyTorch's copies of them, are for Ampere and later.
FLASH = (8, 0)


def missing_units(dtype: str, attention: str, card: Card) -> list[str]:
    """What a card lacks for a run: matrix units for its dtype, an attention kernel.

    Args:
        dtype: `training.dtype`.
        attention: `training.attention`.
        card: the card.
    """
    lacks = []
    if dtype == "bf16" and card.bf16_tflops is None:
        lacks.append("no bf16 matrix units")
    if attention == "flash" and (card.compute_capability or FLASH) < FLASH:
        lacks.append("no flash attention")
    return lacks


def needs_columns(recipe: str, card: Card | None) -> bool:
    """Whether a second copy is made for the products of backward.

    Before Blackwell, and on its consumer cards, the tensor cores take 8 bits in one layout alone, so a transposed copy
    is made; of MXFP8 and of blocks of 128 one with its scales along the other axis. Without a card Hopper's is counted.

    Transformer Engine 2.11 pytorch/utils.py: is_non_tn_fp8_gemm_supported.
    """
    capability = None if card is None else card.compute_capability
    in_any_layout = capability is not None and ((10, 0) <= capability < (12, 0) or capability >= (13, 0))
    return recipe in ("mxfp8", "blockwise") or not in_any_layout
