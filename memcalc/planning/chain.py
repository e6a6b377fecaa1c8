"""The chain that is planned: blocks with their bytes and their forward's cost, in the order in which forward runs them.

A block's backward may need what is inside it (its activations) and its input, the boundary to the block before.
Branches that join are a chain as well: forward runs them one after the other, and what it leaves behind of one until
the join is memory beside the others (`join`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from memcalc.errors import InputError


class Block(NamedTuple):
    """One block. Bytes; a `_top` is the peak of something, its input included.

    Args:
        name: what it is called.
        input_bytes: what the block before hands to it.
        inside_bytes: what it keeps for its backward beside its input and its output.
        output_bytes: what it hands to the next block; its gradient is as large.
        flops: of one forward.
        left_bytes: what its backward leaves behind: gradients of parameters.
        forward_top: of a forward that keeps what is inside; the output is made.
        bare_top: of a forward that keeps nothing; the output is made.
        backward_top: of backward, with what is inside and the gradient of the output.
        rerun_top: the same where the block has run again, with others behind it.
        again_top: of a forward and a backward right after each other, beside the gradient of the output, where the
            block is the last of a checkpoint segment. PyTorch stops such a forward before the output.
        recomputable: whether it may run twice.
        stays_bytes: of what is inside, kept where the block is recomputed all the same: selective checkpointing's.
        again_flops: of a recomputation by itself; None: of a whole forward.
    """

    name: str
    input_bytes: int
    inside_bytes: int
    output_bytes: int
    flops: int
    left_bytes: int
    forward_top: int
    bare_top: int
    backward_top: int
    rerun_top: int
    again_top: int
    recomputable: bool = True
    stays_bytes: int = 0
    again_flops: int | None = None


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
) -> Block:
    """A block of which no more is known than its sizes.

    Forward holds input, inside and output at once. Backward holds input, inside, the gradient of the output, that of
    the input, and the gradients of its parameters. `temporary_bytes` are beside either.
    """
    forward = input_bytes + inside_bytes + output_bytes + temporary_bytes
    backward = 2 * input_bytes + inside_bytes + output_bytes + left_bytes + temporary_bytes
    return Block(
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
    """Blocks, and what lies beside them.

    Args:
        blocks: in the order of forward.
        resident: bytes that are there throughout: weights, states of the optimizer, inputs.
        forward_beside: bytes beside each block's first forward, which later blocks' forwards share.
        backward_beside: bytes beside each block's backward, gradients of later blocks' parameters left out.
        borders: positions (of the first block behind the border) that no checkpoint segment may cross.
        elsewhere: the highest of the moments that no plan changes, such as the optimizer's step.
        elsewhere_name: its phase.
        longest: how many blocks may be one segment; None: any number.
    """

    blocks: tuple[Block, ...]
    resident: int = 0
    forward_beside: tuple[int, ...] = ()
    backward_beside: tuple[int, ...] = ()
    borders: frozenset[int] = frozenset()
    elsewhere: int = 0
    elsewhere_name: str = "optimizer step"
    longest: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no chain.

        Raises:
            InputError: no blocks, negative sizes, or neighbours that do not agree about what lies between them.
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
        """How many blocks there are."""
        return len(self.blocks)

    @cached_property
    def forward_aside(self) -> tuple[int, ...]:
        """All bytes beside each block's first forward."""
        beside = self.forward_beside or (0,) * len(self)
        return tuple(self.resident + extra for extra in beside)

    @cached_property
    def backward_aside(self) -> tuple[int, ...]:
        """All bytes beside each block's backward: resident ones, and gradients that later blocks have left."""
        beside = self.backward_beside or (0,) * len(self)
        left, result = 0, []
        for block, extra in zip(reversed(self.blocks), reversed(beside), strict=True):
            result.append(self.resident + left + extra)
            left += block.left_bytes
        return tuple(reversed(result))

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """For each block the first one behind it that cannot share a segment with it; itself if it never can.

        The last block is never recomputed: its backward follows its forward at once.
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
        """Of one forward of all blocks."""
        return sum(block.flops for block in self.blocks)


def join(branches: Sequence[Sequence[Block]], shared_input: int, joined: Sequence[Block], resident: int = 0) -> Chain:
    """Branches that read one input and are concatenated: forward runs them one after the other, backward in reverse.

    Each branch's output waits for the join, and the gradient of what was joined until all branches have had theirs:
    what each gets is a view of it.

    Args:
        branches: the blocks of each, the first one reading the shared input, the last one making its share.
        shared_input: bytes of the input that all read; it stays throughout.
        joined: the blocks from the concatenation on. The first one's input is what all branches made.
        resident: as of `Chain`.

    Raises:
        InputError: the shares are not what is joined.
    """
    shares = [branch[-1].output_bytes for branch in branches]
    if sum(shares) != joined[0].input_bytes:
        raise InputError(
            f"the branches make {sum(shares):,} bytes, but {joined[0].name} takes {joined[0].input_bytes:,}.",
            "What is joined is as large as its parts.",
            joined[0].name,
        )
    blocks: list[Block] = []
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


def _without_ends(block: Block, shared: int, share: int) -> Block:
    """The block less the input that stands beside it and the output (or its gradient) that does."""
    both = shared + share
    return block._replace(
        input_bytes=block.input_bytes - shared,
        output_bytes=block.output_bytes - share,
        forward_top=block.forward_top - both,
        bare_top=block.bare_top - both,
        backward_top=block.backward_top - both,
        rerun_top=block.rerun_top - both,
        again_top=block.again_top - both,
    )
