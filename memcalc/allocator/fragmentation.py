"""Reserved memory by pool: allocated, waiting for other streams, split, or releasable."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from memcalc.allocator.views import BlockView, SegmentView


class PoolUse(NamedTuple):
    """One pool of one stream. Bytes: reserved = allocated + waiting + split + releasable."""

    pool: Literal["small", "large"]
    stream: int
    segments: int
    reserved: int
    allocated: int  # bytes of allocated blocks
    requested: int  # bytes requested for the allocated blocks
    waiting: int  # freed, but other streams may still use it
    split: int  # free, but in a segment with other blocks in use: PyTorch's inactive_split_bytes
    releasable: int  # free, and released by empty_cache() (of expandable segments: whole pages)
    largest_free: int  # largest request that needs no new segment

    @property
    def rounding(self) -> int:
        """Allocated minus requested bytes."""
        return self.allocated - self.requested

    @property
    def free(self) -> int:
        """Reserved bytes that are not active."""
        return self.split + self.releasable


def pool_uses(segments: Iterable[SegmentView]) -> list[PoolUse]:
    """Return the pools that hold memory, small before large, by stream. Private pools are added to the default ones."""
    groups: dict[tuple[Literal["small", "large"], int], list[SegmentView]] = {}
    for segment in segments:
        groups.setdefault((segment.segment_type, segment.stream), []).append(segment)
    return [_use(*key, groups[key]) for key in sorted(groups, key=lambda key: (key[0] != "small", key[1]))]


def _use(pool: Literal["small", "large"], stream: int, segments: list[SegmentView]) -> PoolUse:
    split = releasable = 0
    blocks: list[BlockView] = []
    for segment in segments:
        blocks += segment.blocks
        free = sum(block.size for block in segment.blocks if block.state == "inactive")
        if segment.is_expandable or len(segment.blocks) == 1:
            releasable += free
        else:
            split += free
    used = [block for block in blocks if block.state == "active_allocated"]
    return PoolUse(
        pool=pool,
        stream=stream,
        segments=len(segments),
        reserved=sum(segment.total_size for segment in segments),
        allocated=sum(block.size for block in used),
        requested=sum(block.requested_size for block in used),
        waiting=sum(block.size for block in blocks if block.state == "active_pending_free"),
        split=split,
        releasable=releasable,
        largest_free=max((block.size for block in blocks if block.state == "inactive"), default=0),
    )
