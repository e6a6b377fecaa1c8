"""A lower bound for every allocator: live bytes, packed without gaps and freed to the driver at once.

A pool that could move memory would need this much. cudaMallocAsync, which maps and unmaps the driver's memory behind
the addresses, is close to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.allocator import flags
from memcalc.allocator.base import BlockAllocator
from memcalc.allocator.blocks import FREE, IN_USE, Block, Segment
from memcalc.allocator.counters import Counters
from memcalc.allocator.device import ReservedDeviceMemory
from memcalc.allocator.driver import GRANULE, Driver
from memcalc.allocator.pools import Pool
from memcalc.allocator.sizes import multiple
from memcalc.allocator.views import BlockView, SegmentView
from memcalc.errors import OutOfMemory
from memcalc.units import format_bytes

FIRST_ADDRESS = 2**46  # of the only segment; any multiple of a granule except 0 would do


@dataclass(frozen=True, slots=True, kw_only=True)
class IdealSettings:
    """Granularity of the packing, in bytes."""

    alignment: int = 512  # of every block: PyTorch's kMinBlockSize; Paddle and TensorFlow align to 256
    granularity: int = GRANULE  # of reserved memory


def parse_settings(text: str) -> IdealSettings:
    """Parse "alignment=256,granularity=512".

    Raises:
        InputError: for any other text, and for sizes that are not powers of two.
    """
    known = {"alignment": flags.size_in_bytes, "granularity": flags.size_in_bytes}
    return IdealSettings(**flags.read_flags(text, known, "the ideal allocator"))


class IdealAllocator(BlockAllocator):
    """Perfect packing on one device.

    Args:
        settings: granularity of the packing.
        driver: the device; None for a device that never runs out of memory.
    """

    def __init__(self, settings: IdealSettings | None = None, driver: Driver | None = None) -> None:
        self.settings = settings or IdealSettings()
        self.driver = driver or Driver()
        super().__init__(ReservedDeviceMemory(self.driver, Counters(counts_rejections=False)))
        self._free_set = Pool(self.counters.large, small=False, by_address=True).free_set_of(0)
        self._segment = Segment(FIRST_ADDRESS, 0, self._free_set, 1)
        self._living: dict[Block, None] = {}
        self._size = 0  # live bytes

    def malloc(self, size: int, stream: int = 0) -> Block:  # noqa: ARG002 - one pool for all streams
        """Allocate `size` bytes, at no particular address.

        Raises:
            OutOfMemory: the live bytes exceed the device's memory.
        """
        if self.uses.waiting:
            self.uses.process()
        rounded = multiple(size, self.settings.alignment)
        if not self._hold(self._size + rounded):
            self.counters.num_ooms += 1
            raise OutOfMemory(
                f"Even perfect packing cannot hold {format_bytes(self._size + rounded)} on a device of "
                f"{format_bytes(self.driver.capacity)}."
            )
        block = Block(FIRST_ADDRESS, rounded, self._segment, self._free_set, 0, IN_USE)
        self._living[block] = None
        self._hand_out(block, size)
        return block

    def empty_cache(self) -> None:
        """Wait for other streams; there is no cache."""
        self.uses.synchronize()

    def statistics(self) -> dict[str, int]:
        """Return current and peak bytes."""
        counters = self.counters
        return {
            "allocated_bytes": counters.allocated_bytes,
            "peak_allocated_bytes": counters.peaks.allocated,
            "peak_reserved_bytes": counters.reserved.peak,
            "reserved_bytes": counters.reserved_bytes,
        }

    def segments(self) -> tuple[SegmentView, ...]:
        """Return one segment with all blocks side by side, as if they could be moved."""
        if not self._living:
            return ()
        blocks, address = [], FIRST_ADDRESS
        for block in self._living:
            state = "active_allocated" if block.state == IN_USE else "active_pending_free"
            blocks.append(BlockView(address, block.size, block.requested, state))  # type: ignore[arg-type]
            address += block.size
        counters, held = self.counters, self.device.reserved
        if held > self._size:
            blocks.append(BlockView(address, held - self._size, 0, "inactive"))
        figures = (counters.allocated_bytes, counters.active_bytes, counters.requested_bytes)
        return (SegmentView(FIRST_ADDRESS, held, *figures, 0, "large", 0, False, tuple(blocks)),)

    def _free(self, block: Block) -> None:
        del self._living[block]
        self.counters.large.requested_now -= block.requested
        block.state = FREE
        assert self._hold(self._size - block.size)

    def _hold(self, size: int) -> bool:
        """Resize reserved memory to hold `size` bytes; return False if the device has not enough memory."""
        held, before = multiple(size, self.settings.granularity), self.device.reserved
        pages = (multiple(held, GRANULE) - multiple(before, GRANULE)) // GRANULE
        if pages > 0 and not self.driver.map_pages(pages, GRANULE):
            return False
        if pages < 0:
            self.driver.unmap_pages(-pages, GRANULE)
        if held != before:
            self.device.changed(self._free_set, FIRST_ADDRESS, held - before, segments=0)
        self._size = size
        return True
