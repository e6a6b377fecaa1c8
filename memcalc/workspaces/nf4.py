"""torchao's NF4Tensor: what it allocates to quantize a weight, and to restore it.

Source: torchao 0.13 dtypes/nf4tensor.py, NF4Tensor.from_tensor and get_original_weight.
"""

from __future__ import annotations

from memcalc.workspaces import Script

BLOCK, SCALER_BLOCK = 64, 256  # to_nf4's defaults: elements of a scale, scales of a factor
CHUNK = 2**20  # CHUNK_SIZE: elements that are compared with all values at once
VALUES, INDEX_BYTES = 16, 8  # of NF4; of a `long`


def dequantized(elements: int, width: int) -> Script:
    """Return what is live when get_original_weight allocates its result: 8·n + 2·w·n bytes and the scales.

    Indices of the high and low halves of bytes, their values, and these times their scales, repeated for each.

    Args:
        elements: of the weight, n.
        width: bytes of an element, w.
    """
    half, indices, share = elements // 2, INDEX_BYTES * elements // 2, width * elements // 2
    scales = width * elements // BLOCK
    return (
        *(half, indices, -half) * 2,
        *(share, share),
        *(scales, scales, -scales),
        *(share, share, -share) * 2,
    )


def quantized(elements: int, width: int) -> Script:
    """Return the requests of from_tensor, of which the packed weight, its scales and their factors stay.

    Args:
        elements: of the weight, n; it has n/64 scales.
        width: bytes of an element.
    """
    scales = elements // BLOCK
    factors = scales // SCALER_BLOCK
    wide, narrow = width * scales, width * factors
    absolute = (width * elements, wide, INDEX_BYTES * scales, -width * elements, -INDEX_BYTES * scales)
    centred = (wide, -wide)
    factor = (wide, narrow, INDEX_BYTES * factors, -wide, -INDEX_BYTES * factors, *(wide,) * 3, -wide, -wide)
    rounded = (*(wide, wide, -wide, wide, -wide), scales, narrow)
    double = (*absolute, *centred, *factor, *rounded, *(-wide,) * 3, -narrow)
    chunks = dict.fromkeys((min(CHUNK, elements), elements % CHUNK))  # equal ones get the same blocks again
    nearest = [request for chunk in chunks if chunk for request in _nearest(chunk, width)]
    packed = (elements // 2, elements // 2, -(elements // 2))
    scaled = (*absolute, width * elements, elements)
    return (*double, *scaled, *nearest, *packed, -elements, -width * elements, -wide)


def _nearest(elements: int, width: int) -> Script:
    """Return quantize_tensor_nearest: distances to all values, absolute ones, and the smallest with its index."""
    distances, indices = VALUES * width * elements, INDEX_BYTES * elements
    smallest = (width * elements, indices, -width * elements)
    return (distances, distances, -distances, *smallest, -distances, elements, -indices, -elements)


def row_norms(elements: int, width: int) -> Script:
    """Return the norms of rows of a weight and its adapter, with what stays until they are complete.

    The weight, the adapter's product, this scaled, and the sum (torchtune 0.6.1 modules/peft/dora.py,
    initialize_dora_magnitude).
    """
    whole = width * elements
    restored = dequantized(elements, width)
    freed = tuple(-each for each in _left(restored))
    return (*restored, whole, *freed, *(whole,) * 3, -whole)


def _left(script: Script) -> list[int]:
    """Return the buffers that a script leaves."""
    left: list[int] = []
    for request in script:
        if request > 0:
            left.append(request)
        else:
            left.remove(-request)
    return left
