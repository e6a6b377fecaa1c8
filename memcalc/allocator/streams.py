"""Blocks that other streams use: when they are freed, they wait until those streams are done.

Source: torch c10/cuda/CUDACachingAllocator.cpp: recordStream, insert_events, process_events,
synchronize_and_free_events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from memcalc.allocator.blocks import Block


class StreamUses:
    """Which streams use which blocks, and the events that freed blocks wait for.

    Args:
        release: what to do with a block that no stream uses any more.
    """

    def __init__(self, release: Callable[[Block], None]) -> None:
        self._release = release
        self.used: dict[Block, dict[int, None]] = {}  # streams in the order in which they were recorded
        self.waiting: dict[Block, int] = {}  # outstanding events of freed blocks
        self.ready = True  # whether an event that is looked at is complete; False holds all events back
        self._queues: dict[int, deque[Block]] = {}
        self._deferred: list[Block] = []  # freed during a graph capture, when no event may be looked at

    def record(self, block: Block, stream: int) -> None:
        """Another stream uses the block; its own stream needs no event."""
        if stream != block.shelf.stream:
            self.used.setdefault(block, {})[stream] = None

    def freed(self, block: Block, *, capturing: bool) -> None:
        """A block with recorded uses was freed."""
        self.waiting[block] = 0
        if capturing:
            self._deferred.append(block)
        else:
            self._insert(block)

    def hold(self, block: Block) -> None:
        """A block was freed whose completion will be told by `complete`."""
        self.used.pop(block, None)
        self.waiting[block] = 1

    def complete(self, block: Block) -> None:
        """The completion of a block that was held; nothing if emptying the cache already waited for it."""
        if self.waiting.pop(block, 0):
            self._release(block)

    def process(self) -> None:
        """Frees the blocks whose events are all complete; each stream's events complete in order."""
        self._insert_deferred()
        if self.ready:
            for queue in self._queues.values():
                while queue:
                    self._passed(queue.popleft())

    def synchronize(self) -> None:
        """Waits for all events."""
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
        """One event in the queue of each stream."""
        streams = self.used.pop(block)
        self.waiting[block] = len(streams)
        for stream in streams:
            self._queues.setdefault(stream, deque()).append(block)

    def _passed(self, block: Block) -> None:
        self.waiting[block] -= 1
        if not self.waiting[block]:
            del self.waiting[block]
            self._release(block)
