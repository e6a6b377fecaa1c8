"""Differences between PyTorch versions in the allocator's figures and messages.

Verified by running the released wheels on a driver that only counts allocations: 2.6.0, 2.7.1, 2.8.0, 2.9.1, 2.10.0,
2.11.0, 2.12.0, 2.12.1, 2.13.0, and for the placement of blocks also 2.14.1 and 2.15.0.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from memcalc.errors import InputError

OLDEST, NEWEST = 6, 15  # 2.6 to 2.15
DEFAULT_VERSION = "2.13"

TieBreak = Literal["address", "block", "segment"]


class Version(NamedTuple):
    """A PyTorch version without its patch number: no patch version changed the allocator's rules."""

    major: int
    minor: int

    def __str__(self) -> str:
        """Return the usual notation: "2.13"."""
        return f"{self.major}.{self.minor}"

    @property
    def tie_break(self) -> TieBreak:
        """Rule between free blocks of equal size: the lowest address, the oldest block, or the oldest segment.

        Source: BlockComparatorSize in c10/cuda/CUDACachingAllocator.cpp.
        """
        if self.minor <= 11:
            return "address"
        return "block" if self.minor == 12 else "segment"

    @property
    def open_slot_offset(self) -> int:
        """First slot of `>` in roundup_power2_divisions, relative to the last key: up to 2.9 it overwrites that key."""
        return 0 if self.minor <= 9 else 1

    @property
    def smallest_split_mb(self) -> int:
        """Smallest valid max_split_size_mb and max_non_split_rounding_mb, in MiB: "> 20" up to 2.9, then ">= 20"."""
        return 21 if self.minor <= 9 else 20

    @property
    def advised_variable(self) -> str:
        """The environment variable in the out-of-memory message: one version used the newer name."""
        return "PYTORCH_ALLOC_CONF" if self.minor == 10 else "PYTORCH_CUDA_ALLOC_CONF"

    @property
    def advised_page(self) -> str:
        """The URL in the out-of-memory message."""
        if self.minor <= 10:
            return "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables"
        return (
            "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
        )

    @property
    def rounds_limit(self) -> bool:
        """Whether a memory fraction of the device is rounded to the nearest byte; before 2.13 it was truncated."""
        return self.minor >= 13

    @property
    def pools_are_captures(self) -> bool:
        """Whether torch.cuda.use_mem_pool, like a graph capture, prevents emptying the cache."""
        return self.minor <= 12

    @property
    def lends_before_flush(self) -> bool:
        """Whether memory pools with use_on_oom are searched before the cache is emptied; up to 2.10 it was after."""
        return self.minor >= 11

    @property
    def counts_rejections(self) -> bool:
        """Whether memory_stats has num_oom_rejections."""
        return self.minor >= 12


def parse_version(text: str) -> Version:
    """Return "2.13.0+cu130" or "2.13" as a version.

    Raises:
        InputError: for a version without known rules.
    """
    match = re.match(r"(\d{1,9})\.(\d{1,9})(?:\.|\+|$)", text)
    if match is None or int(match[1]) != 2 or not OLDEST <= int(match[2]) <= NEWEST:
        raise InputError(
            f"the allocator of torch {text!r} is not modelled.", f"Use a version from 2.{OLDEST} to 2.{NEWEST}."
        )
    return Version(int(match[1]), int(match[2]))
