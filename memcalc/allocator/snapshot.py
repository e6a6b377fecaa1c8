"""The segments of an allocator as records with the fields of torch.cuda.memory_snapshot.

Source: torch c10/cuda/CUDACachingAllocator.cpp: snapshot; torch/csrc/cuda/Module.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from memcalc.allocator.blocks import FREE, IN_USE, UNMAPPED, WAITING, Block, Segment
from memcalc.allocator.views import BlockView, SegmentView, State

_STATES: dict[int, State] = {IN_USE: "active_allocated", WAITING: "active_pending_free", FREE: "inactive"}


def blocks_of(segment: Segment) -> Iterator[Block]:
    """Yield the blocks of a segment by address, including unmapped ones."""
    block: Block | None = segment.head
    while block is not None:
        yield block
        block = block.next


def views(segments: Iterable[tuple[int, Segment]]) -> tuple[SegmentView, ...]:
    """Return records of segments, each given with its pool's id, sorted by address."""
    records = []
    for pool, segment in segments:
        for unmapped, run in groupby(blocks_of(segment), key=lambda block: block.state == UNMAPPED):
            if not unmapped:
                records.append(_view(pool, segment, list(run)))
    return tuple(sorted(records))


def _view(pool: int, segment: Segment, blocks: list[Block]) -> SegmentView:
    active = [block for block in blocks if block.state != FREE]
    return SegmentView(
        address=blocks[0].address,
        total_size=sum(block.size for block in blocks),
        allocated_size=sum(block.size for block in active if block.state == IN_USE),
        active_size=sum(block.size for block in active),
        requested_size=sum(block.requested for block in active),
        stream=segment.free_set.stream,
        segment_type="small" if segment.free_set.pool.small else "large",
        segment_pool_id=pool,
        is_expandable=bool(segment.page),
        blocks=tuple(BlockView(b.address, b.size, b.requested, _STATES[b.state]) for b in blocks),
    )
