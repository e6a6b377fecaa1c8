"""What CUDA's operators allocate inside, where no dispatcher sees it: rules on plain integers, without torch.

A rule gives a *script*: sizes in bytes in the order of the allocator's calls, positive for memory that is taken,
negative for memory that is given back (the newest block of that size). What a script has left over is kept.
"""

Script = tuple[int, ...]


def transient(*blocks: int) -> Script:
    """Blocks taken one after the other and given back in the opposite order."""
    taken = tuple(block for block in blocks if block)
    return taken + tuple(-block for block in reversed(taken))


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return ceil_div(number, multiple) * multiple


def most(script: Script) -> int:
    """The most bytes that a script holds at once."""
    level = highest = 0
    for change in script:
        level += change
        highest = max(highest, level)
    return highest
