"""What an allocator holds, as those see it who replay events through it, whatever framework's it models."""

from __future__ import annotations

from typing import Literal, NamedTuple

State = Literal["active_allocated", "active_pending_free", "inactive"]


class BlockView(NamedTuple):
    """One block of a segment, in the words of torch.cuda.memory_snapshot. Bytes."""

    address: int
    size: int
    requested_size: int  # by the last user; stale in an inactive block
    state: State


class SegmentView(NamedTuple):
    """Memory that came from the driver in one piece, in the words of torch.cuda.memory_snapshot. Bytes.

    Of an expandable segment each contiguous mapped range is a record of its own.
    """

    address: int
    total_size: int
    allocated_size: int
    active_size: int
    requested_size: int  # of active blocks
    stream: int
    segment_type: Literal["small", "large"]
    segment_pool_id: int  # 0 is the default pool
    is_expandable: bool
    blocks: tuple[BlockView, ...]  # by address
