"""Advice, and allocator settings that avoid fragmentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memcalc.diagnosis.accounting import Account
from memcalc.diagnosis.report import OutOfMemoryReport

MIB = 2**20

# max_split_size_mb: the minimum accepted by every version is 21 (allocator/pytorch/versions.py). Above 512 too few
# blocks are large enough to stay unsplit. At most half of the request, so that a block that held such a tensor is never
# split.
_LEAST_SPLIT, _MOST_SPLIT = 32, 512

_VARIABLES = {
    "cuda": "PYTORCH_CUDA_ALLOC_CONF",
    "hip": "PYTORCH_HIP_ALLOC_CONF",
    "npu": "PYTORCH_NPU_ALLOC_CONF",
}


class Advice(NamedTuple):
    """One remedy."""

    lever: str  # what to change
    effect: str  # of the change, as text
    gain_bytes: int | None = None  # upper bound of the gain; None if the message has no figures for it
    enough: bool | None = None  # whether that gain would let the request succeed


def gain_of(account: Account, gain: int) -> tuple[int, bool | None]:
    """Return the gain of a remedy, and whether it is enough for the failed request."""
    shortfall = account.shortfall
    return gain, None if shortfall is None else gain >= shortfall


def fragmentation_settings(report: OutOfMemoryReport, account: Account) -> Iterator[Advice]:
    """Yield allocator settings that avoid fragmentation."""
    if account.cached is None:
        return
    cached = account.cached.bytes
    if report.framework == "tensorflow":
        yield Advice(
            "TF_GPU_ALLOCATOR=cuda_malloc_async",
            "uses the driver's memory pool instead of BFC; the pool can map separate pages contiguously",
            *gain_of(account, cached),
        )
        return
    if report.framework == "xla":
        yield Advice(
            "XLA_PYTHON_CLIENT_ALLOCATOR=platform",
            "sends each request to the driver and frees it at once: slow, but without fragmentation",
            *gain_of(account, cached),
        )
        return
    variable = _VARIABLES.get(report.device_type)
    if variable is None:
        return
    old = "1." in report.wording  # 1.x and 2.0 print the same message
    yield Advice(
        f"{variable}=expandable_segments:True",
        "lets segments grow, so cached memory can serve requests of any size"
        + ("; needs PyTorch 2.1 or later, and Linux" if old else "; not on Windows"),
        *gain_of(account, cached),
    )
    split = _split_size(account)
    if split is not None:
        yield Advice(
            f"{variable}=max_split_size_mb:{split}",
            f"does not split freed blocks of {split} MiB and more: they serve the next large tensor, or are freed to "
            "the device",
            *gain_of(account, cached),
        )


def _split_size(account: Account) -> int | None:
    """Return the largest power of two, in MiB, up to half of the request; None if too small."""
    if account.requested is None:
        return None
    split = _MOST_SPLIT
    while split * MIB * 2 > account.requested.bytes:
        split //= 2
    return split if split >= _LEAST_SPLIT else None
