"""Internal blocks of torch.linalg on CUDA."""

from __future__ import annotations

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
