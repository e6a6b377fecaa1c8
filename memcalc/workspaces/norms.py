"""Backward of LayerNorm and RMSNorm for many rows.

ATen native/cuda/layer_norm_kernel.cu, torch 2.8 and later: beyond 65536 rows of few columns the gradients of weight
and bias are first summed in partial rows, then each of these in a separate column sum. Checked at its boundaries.
"""

from __future__ import annotations

from memcalc.workspaces import Script, ceil_div
from memcalc.workspaces.multiprocessors import Multiprocessors
from memcalc.workspaces.reductions import column_sum

FEW_ROWS = 65536
PARTIAL_ELEMENTS = 2**20  # maximum of one buffer of partial rows


def norm_backward(rows: int, columns: int, item_bytes: int, parameters: int, gpu: Multiprocessors) -> Script:
    """Return the script of backward, without its outputs.

    Args:
        rows: vectors that are normalized.
        columns: their length.
        item_bytes: of the weight's dtype.
        parameters: 2 for weight and bias, 1 for a weight, 0 for neither.
        gpu: multiprocessors of the GPU.
    """
    if rows <= FEW_ROWS or columns // 32 >= gpu.count // 2 or not parameters:
        return ()
    partial = min(ceil_div(rows, 32), PARTIAL_ELEMENTS // columns)
    buffer, result = partial * columns * item_bytes, columns * item_bytes
    script: list[int] = [buffer] * parameters
    for _ in range(parameters):
        script += [result, *column_sum(partial, columns, gpu), -result]
    return (*script, *[-buffer] * parameters)
