"""What an allocator is to those who replay events through it, whatever framework's it models."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

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


class Allocator(Protocol):
    """A policy that turns requests into memory of the device. What `malloc` returns is only handed back to it."""

    def malloc(self, size: int, stream: int = 0) -> Any:
        """Memory for `size` bytes, at least 1; raises OutOfMemory with the text that the framework would print."""

    def free(self, block: Any) -> None:
        """Takes memory back."""

    def record_stream(self, block: Any, stream: int) -> None:
        """Another stream uses the memory too."""

    def empty_cache(self) -> None:
        """Gives cached memory back to the driver."""

    def statistics(self) -> dict[str, int]:
        """Counters, under the framework's names."""

    def segments(self) -> tuple[SegmentView, ...]:
        """What is held of the device, by address."""
