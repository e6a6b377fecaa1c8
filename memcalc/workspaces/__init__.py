"""Allocations inside CUDA operators, invisible to the dispatcher: rules on plain integers, without torch.

A rule returns a *script*: sizes in bytes in the order of the allocator's calls, positive for an allocation, negative
for a free (of the newest block of that size). Blocks that are not freed stay allocated.
"""

from itertools import accumulate

Script = tuple[int, ...]


def transient(*blocks: int) -> Script:
    """Return the script of blocks that are allocated in order and freed in reverse order."""
    taken = tuple(block for block in blocks if block)
    return taken + tuple(-block for block in reversed(taken))


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient, rounded up."""
    return -(-numerator // denominator)


def round_up(number: int, multiple: int) -> int:
    """Return `number` rounded up to a multiple."""
    return ceil_div(number, multiple) * multiple


def most(script: Script) -> int:
    """Return the peak bytes of a script."""
    return max(accumulate(script, initial=0))
