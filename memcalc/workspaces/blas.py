"""The cuBLAS workspace: one per thread and stream that runs matmuls, kept from the first matmul on.

ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper, since torch 2.12 on Blackwell too; else 2 x 4096 KiB + 8 x 16 KiB.
If CUBLAS_WORKSPACE_CONFIG is set, it gives the sizes instead: the sum of :SIZE:COUNT in KiB.
"""

from __future__ import annotations

import re

DEFAULT = (2 * 4096 + 8 * 16) * 2**10
HOPPER = 32 * 2**20
LIKE_HOPPER_SINCE = (2, 12)  # the version from which capabilities beyond 9.x use the same size

_PAIR = re.compile(r":(\d+):(\d+)")


def cublas_workspace(capability: tuple[int, int], release: tuple[int, int] = (2, 13), config: str = "") -> int:
    """Return the bytes of one workspace.

    Args:
        capability: compute capability of the GPU.
        release: version of torch.
        config: CUBLAS_WORKSPACE_CONFIG; a value that does not match its pattern counts as not set.
    """
    pairs = _PAIR.findall(config)
    if pairs:
        return sum(int(size) * 2**10 * int(count) for size, count in pairs)
    if capability[0] == 9 or (capability[0] > 9 and release >= LIKE_HOPPER_SINCE):
        return HOPPER
    return DEFAULT
