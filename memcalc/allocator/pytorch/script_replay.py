"""Allocators for encoded requests: the lean ones and the complete one, and the choice between them for a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from memcalc.allocator.pytorch.constants import MIN_BLOCK, STREAM_SHIFT
from memcalc.allocator.pytorch.lean import LeanAllocator, PeakBytes
from memcalc.allocator.pytorch.lean_expandable import LeanExpandableAllocator
from memcalc.allocator.pytorch.rounding import block_size
from memcalc.allocator.pytorch.settings import Settings, parse_settings
from memcalc.allocator.pytorch.versions import Version, parse_version

if TYPE_CHECKING:
    from memcalc.allocator.blocks import Block

Pairs = Sequence[tuple[int, int]]


def allocator_of(alloc_conf: str, torch: str, usable_bytes: int | None, capacity: int | None) -> ScriptAllocator:
    """Return the fastest allocator that models PyTorch under these settings.

    Args:
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF.
        torch: the PyTorch version, for example "2.13".
        usable_bytes: bytes of the device that the allocator can use; None for no limit.
        capacity: bytes of the device; None: the same as `usable_bytes`.

    Raises:
        InputError: the version does not accept these settings.
    """
    version = parse_version(torch)
    settings = parse_settings(alloc_conf, version)
    if LeanAllocator.serves(settings, version):
        return LeanAllocator(version, usable_bytes)
    if LeanExpandableAllocator.serves(settings, version):
        return LeanExpandableAllocator(usable_bytes, capacity)
    return FullScriptAllocator(settings, version, usable_bytes, capacity)


class FullScriptAllocator:
    """`CachingAllocator` for encoded requests: serves all settings and versions."""

    def __init__(self, settings: Settings, version: Version, usable_bytes: int | None, capacity: int | None) -> None:
        from memcalc.allocator.driver import Driver
        from memcalc.allocator.pytorch.caching import CachingAllocator  # most runs do without it

        driver = (
            Driver(usable_bytes)
            if usable_bytes is None or capacity is None
            else Driver(capacity, capacity - usable_bytes)
        )
        self._allocator = CachingAllocator(settings, version, driver)
        self._blocks: list[Block | None] = []
        self.block_sizes: list[int] = []
        self.growth: list[tuple[int, int]] = []
        self._allocated = self._asked = 0

    @property
    def reserved_bytes(self) -> int:
        """Reserved bytes."""
        return self._allocator.counters.reserved.current

    @property
    def peak_reserved_bytes(self) -> int:
        """Peak reserved bytes."""
        return self._allocator.counters.reserved.peak

    @property
    def retries(self) -> int:
        """How often the cache was emptied for a request."""
        return self._allocator.counters.num_alloc_retries

    def play(self, script: Iterable[int], /) -> PeakBytes:
        """Serve requests; see `LeanAllocator.play`.

        Raises:
            OutOfMemory: a request does not fit, even after the cache is emptied.
        """
        most, most_asked = self._allocated, self._asked
        reserved = self.reserved_bytes
        for change in script:
            if change > 0:
                stream = change >> STREAM_SHIFT
                block = self._allocator.malloc(change - (stream << STREAM_SHIFT), stream)
                if self.reserved_bytes != reserved:
                    reserved = self.reserved_bytes
                    self.growth.append((len(self._blocks), reserved))
                self._blocks.append(block)
                self.block_sizes.append(block.size // MIN_BLOCK)
                self._allocated += block.size
                self._asked += block_size(block.requested)
                most, most_asked = max(most, self._allocated), max(most_asked, self._asked)
            elif change:
                freed = self._blocks[~change]
                assert freed is not None
                self._allocated -= freed.size
                self._asked -= block_size(freed.requested)
                self._allocator.free(freed)
            else:
                self._blocks.append(None)
                self.block_sizes.append(0)
        return PeakBytes(most, most_asked)

    def empty_cache(self) -> None:
        """Free cached segments, as torch.cuda.empty_cache()."""
        self._allocator.empty_cache()

    def watch(self) -> None:
        """Do nothing: this allocator cannot tell whether requests would repeat."""

    def would_repeat(self, carried: Callable[[], Pairs | None], /) -> bool:  # noqa: ARG002 - as of the lean ones
        """Return False, because it is unknown."""
        return False


ScriptAllocator = LeanAllocator | LeanExpandableAllocator | FullScriptAllocator
