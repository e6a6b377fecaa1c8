"""Internal blocks of torch.linalg on CUDA, and the workspace of cuBLAS."""

from __future__ import annotations

import re

from memcalc.workspaces import Script

INT, BOOL = 4, 1  # bytes of cuSOLVER's status of a matrix, and of whether any status is not 0
BATCHED_SIDE = 32  # cuSOLVER's batched gesvdj takes matrices up to this side


def decomposition(rows: int, columns: int, item: int) -> Script:
    """Return the internal blocks of torch.linalg.svd(full_matrices=False) of one matrix, without cuSOLVER's workspace.

    They are the status and a copy in column-major order, which cuSOLVER overwrites. The batched kernel of small
    matrices computes all singular vectors of both sides. cusolverDnSgesvdj_bufferSize returns the size of the
    workspace, which NVIDIA does not document. If gesvdj does not converge, gesvd follows, with its own workspace.

    Args:
        rows: rows of the matrix.
        columns: columns.
        item: bytes per element.

    Source: torch 2.13 aten/src/ATen/native/BatchLinearAlgebra.cpp, _linalg_svd_out, _linalg_check_errors;
    native/cuda/linalg/BatchLinearAlgebraLib.cpp, svd_cusolver, svd_cusolver_gesvdjBatched.
    """
    copy, long = rows * columns * item, max(rows, columns)
    square = long * long * item if rows != columns and long <= BATCHED_SIDE else 0
    inside = (square, -square) if square else ()
    return (INT, copy, *inside, -copy, BOOL, -BOOL, -INT)


DEFAULT = (2 * 4096 + 8 * 16) * 2**10
HOPPER = 32 * 2**20
LIKE_HOPPER_SINCE = (2, 12)  # the version from which capabilities beyond 9.x use the same size

_PAIR = re.compile(r":(\d+):(\d+)")


def cublas_workspace(capability: tuple[int, int], release: tuple[int, int] = (2, 13), config: str = "") -> int:
    """Return the bytes of one cuBLAS workspace: one per thread and stream that runs matmuls, kept from the first on.

    ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper, since torch 2.12 on Blackwell too; else 2 x 4096 KiB + 8 x 16 KiB.
    If CUBLAS_WORKSPACE_CONFIG is set, it gives the sizes instead: the sum of :SIZE:COUNT in KiB.

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
