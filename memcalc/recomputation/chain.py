"""The chain to plan for: blocks in forward order, with their bytes and the FLOPs of their forward.

A block's backward may need its activations and its input, the boundary to the block before. Parallel branches that
join form a chain as well: forward runs them one at a time, and what it leaves of one until the join is memory in
addition to the others (`join`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from memcalc.errors import InputError


class ChainBlock(NamedTuple):
    """One block. Bytes; each `_top` is a peak and includes the block's input."""

    name: str  # of the block
    input_bytes: int  # output of the block before
    inside_bytes: int  # saved for backward, other than its input and its output
    output_bytes: int  # input of the next block; its gradient has the same size
    flops: int  # of one forward
    left_bytes: int  # persistent after its backward: gradients of parameters
    forward_top: int  # peak of a forward that saves activations, output included
    bare_top: int  # peak of a forward that saves nothing, output included
    backward_top: int  # peak of backward, with saved activations and the gradient of the output
    rerun_top: int  # peak of backward if the block was recomputed, followed by others of its segment
    # peak of a recomputation directly followed by its backward, in addition to the gradient of the output, for the last
    # block of a checkpoint segment. PyTorch stops such a recomputation before the output.
    recompute_top: int
    recomputable: bool = True  # whether it may be recomputed
    # part of `inside_bytes` that selective checkpointing saves although the block is recomputed
    released_late_bytes: int = 0
    recompute_flops: int | None = None  # of its recomputation; None: of a whole forward


def simple_block(
    name: str,
    input_bytes: int,
    inside_bytes: int,
    output_bytes: int,
    flops: int,
    left_bytes: int = 0,
    *,
    temporary_bytes: int = 0,
    recomputable: bool = True,
) -> ChainBlock:
    """Return a block from its sizes alone.

    Forward holds input, activations and output at once. Backward holds input, activations, the gradients of output and
    input, and the gradients of its parameters. `temporary_bytes` are added to both.
    """
    forward = input_bytes + inside_bytes + output_bytes + temporary_bytes
    backward = 2 * input_bytes + inside_bytes + output_bytes + left_bytes + temporary_bytes
    return ChainBlock(
        name,
        input_bytes,
        inside_bytes,
        output_bytes,
        flops,
        left_bytes,
        forward,
        input_bytes + output_bytes + temporary_bytes,
        backward,
        backward,
        max(forward, backward),
        recomputable,
    )


@dataclass(frozen=True)
class Chain:
    """Blocks in forward order, and the memory allocated in addition to them."""

    blocks: tuple[ChainBlock, ...]  # in forward order
    resident: int = 0  # bytes allocated throughout: weights, optimizer state, inputs
    # additional bytes at each block's first forward, shared by later blocks' forwards
    forward_extra: tuple[int, ...] = ()
    # additional bytes at each block's backward, without gradients of later blocks' parameters
    backward_extra: tuple[int, ...] = ()
    # positions (of the first block after the border) that no checkpoint segment may cross
    borders: frozenset[int] = frozenset()
    elsewhere: int = 0  # the largest peak that no plan changes, for example of the optimizer step
    elsewhere_name: str = "optimizer step"  # its phase
    longest: int | None = None  # maximum number of blocks in a segment; None: any number

    def __post_init__(self) -> None:
        """Check the chain.

        Raises:
            InputError: no blocks, negative sizes, or neighbors that disagree about the boundary between them.
        """
        if not self.blocks:
            raise InputError("the chain has no blocks.", "Add at least one block.", "blocks")
        for block in self.blocks:
            for field, value in block._asdict().items():
                if field != "name" and value is not None and value < 0:
                    raise InputError(f"{field} = {value} is negative.", "Sizes are 0 or more.", block.name)
        for before, after in zip(self.blocks, self.blocks[1:], strict=False):
            if before.output_bytes != after.input_bytes:
                raise InputError(
                    f"{before.name} outputs {before.output_bytes:,} bytes, but {after.name} reads "
                    f"{after.input_bytes:,}.",
                    "The output of a block is the input of the next one.",
                    after.name,
                )

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.blocks)

    @cached_property
    def forward_aside(self) -> tuple[int, ...]:
        """All additional bytes at each block's first forward."""
        beside = self.forward_extra or (0,) * len(self)
        return tuple(self.resident + extra for extra in beside)

    @cached_property
    def backward_aside(self) -> tuple[int, ...]:
        """All additional bytes at each block's backward: resident ones, and gradients of later blocks' parameters."""
        beside = self.backward_extra or (0,) * len(self)
        left, result = 0, []
        for block, extra in zip(reversed(self.blocks), reversed(beside), strict=True):
            result.append(self.resident + left + extra)
            left += block.left_bytes
        return tuple(reversed(result))

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """For each block, the first later one that cannot share a segment with it; itself if it has no segment.

        The last block is never recomputed: its backward directly follows its forward.
        """
        result = [0] * len(self)
        stop = len(self) - 1
        for position in range(len(self) - 1, -1, -1):
            if not self.blocks[position].recomputable or position == len(self) - 1:
                stop = position
            result[position] = stop if self.longest is None else min(stop, position + self.longest)
            if position in self.borders:
                stop = position
        return tuple(result)

    @cached_property
    def flops(self) -> int:
        """FLOPs of one forward of all blocks."""
        return sum(block.flops for block in self.blocks)


def join(
    branches: Sequence[Sequence[ChainBlock]], shared_input: int, joined: Sequence[ChainBlock], resident: int = 0
) -> Chain:
    """Return the chain of branches that read one input and are concatenated; forward runs them one at a time.

    Each branch's output stays live until the join. The gradient of the joined tensor stays live until all branches have
    run backward, because each branch's gradient is a view of it.

    Args:
        branches: the blocks of each branch; the first one reads the shared input, the last one produces the branch's
            part.
        shared_input: bytes of the input that all branches read; it stays live throughout.
        joined: the blocks from the concatenation on. The first one's input is the output of all branches.
        resident: as for `Chain`.

    Raises:
        InputError: the sum of the branches' outputs differs from the joined input.
    """
    shares = [branch[-1].output_bytes for branch in branches]
    if sum(shares) != joined[0].input_bytes:
        raise InputError(
            f"the branches make {sum(shares):,} bytes, but {joined[0].name} takes {joined[0].input_bytes:,}.",
            "Set the input of the joined block to the sum of the branches.",
            joined[0].name,
        )
    blocks: list[ChainBlock] = []
    forward: list[int] = []
    backward: list[int] = []
    borders: set[int] = set()
    waiting = 0
    for branch, share in zip(branches, shares, strict=True):
        borders.add(len(blocks))
        for index, block in enumerate(branch):
            blocks.append(_without_ends(block, shared_input * (index == 0), share * (index == len(branch) - 1)))
            forward.append(shared_input + waiting + share * (index == len(branch) - 1))
            backward.append(shared_input + sum(shares))
        waiting += share
    borders.add(len(blocks))
    first = joined[0]
    blocks += [_without_ends(first, 0, 0)._replace(input_bytes=0), *joined[1:]]
    forward += [shared_input] * len(joined)
    backward += [shared_input] * len(joined)
    return Chain(tuple(blocks), resident, tuple(forward), tuple(backward), frozenset(borders))


def _without_ends(block: ChainBlock, shared: int, share: int) -> ChainBlock:
    """Return the block without the shared input and the branch output (or its gradient), counted separately."""
    both = shared + share
    return block._replace(
        input_bytes=block.input_bytes - shared,
        output_bytes=block.output_bytes - share,
        forward_top=block.forward_top - both,
        bare_top=block.bare_top - both,
        backward_top=block.backward_top - both,
        rerun_top=block.rerun_top - both,
        recompute_top=block.recompute_top - both,
    )
