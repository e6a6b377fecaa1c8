"""Blocks that other streams use: freed blocks wait until those streams are done.

Source: torch c10/cuda/CUDACachingAllocator.cpp: recordStream, insert_events, process_events,
synchronize_and_free_events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from memcalc.allocator.blocks import Block


class StreamUses:
    """The streams that use each block, and the CUDA events that freed blocks wait for.

    Args:
        release: called with a block that no stream uses any more.
    """

    def __init__(self, release: Callable[[Block], None]) -> None:
        self._release = release
        self.used: dict[Block, dict[int, None]] = {}  # streams in the order in which they were recorded
        self.waiting: dict[Block, int] = {}  # outstanding events of freed blocks
        self.ready = True  # whether a queried event is complete; False holds all events back
        self._queues: dict[int, deque[Block]] = {}
        self._deferred: list[Block] = []  # freed during a graph capture, when no event may be queried

    def record(self, block: Block, stream: int) -> None:
        """Record that another stream uses the block; its own stream needs no event."""
        if stream != block.free_set.stream:
            self.used.setdefault(block, {})[stream] = None

    def freed(self, block: Block, *, capturing: bool) -> None:
        """Start waiting for a freed block with recorded uses."""
        self.waiting[block] = 0
        if capturing:
            self._deferred.append(block)
        else:
            self._insert(block)

    def defer(self, block: Block) -> None:
        """Make a freed block wait until `complete` is called."""
        self.used.pop(block, None)
        self.waiting[block] = 1

    def complete(self, block: Block) -> None:
        """Release a block that was held; does nothing if emptying the cache already waited for it."""
        if self.waiting.pop(block, 0):
            self._release(block)

    def process(self) -> None:
        """Release the blocks that have only complete events; each stream's events complete in order."""
        self._insert_deferred()
        if self.ready:
            for queue in self._queues.values():
                while queue:
                    self._passed(queue.popleft())

    def synchronize(self) -> None:
        """Wait for all events."""
        self._insert_deferred()
        for queue in self._queues.values():
            while queue:
                self._passed(queue.popleft())
        for block in list(self.waiting):
            self.complete(block)

    def _insert_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for block in deferred:
            self._insert(block)

    def _insert(self, block: Block) -> None:
        """Insert one event for the block into the queue of each stream that used it."""
        streams = self.used.pop(block)
        self.waiting[block] = len(streams)
        for stream in streams:
            self._queues.setdefault(stream, deque()).append(block)

    def _passed(self, block: Block) -> None:
        self.waiting[block] -= 1
        if not self.waiting[block]:
            del self.waiting[block]
            self._release(block)
