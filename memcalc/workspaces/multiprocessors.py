"""The properties of a GPU that kernels query before they choose a configuration."""

from __future__ import annotations

from typing import NamedTuple


class Multiprocessors(NamedTuple):
    """The multiprocessors of a GPU.

    Args:
        count: number of multiprocessors.
        threads: maximum threads per multiprocessor: 2048 on A100 and H100, 1536 on consumer GPUs.
        major: major compute capability.
    """

    count: int  # type: ignore[assignment] # hides tuple.count, which no GPU needs
    threads: int
    major: int = 8
