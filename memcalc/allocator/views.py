"""Read-only views of an allocator's segments and blocks, the same for every framework."""

from __future__ import annotations

from typing import Literal, NamedTuple

State = Literal["active_allocated", "active_pending_free", "inactive"]


class BlockView(NamedTuple):
    """One block of a segment, with the fields of torch.cuda.memory_snapshot. Bytes."""

    address: int
    size: int
    requested_size: int  # by the last allocation; stale in an inactive block
    state: State


class SegmentView(NamedTuple):
    """Memory from one driver allocation, with the fields of torch.cuda.memory_snapshot. Bytes.

    Each contiguous mapped range of an expandable segment is a separate record.
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
    blocks: tuple[BlockView, ...]  # sorted by address
