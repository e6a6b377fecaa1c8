"""Causes of a failed request, in order of precedence.

host memory                   host memory ran out, not device memory
larger than the device        the requested tensor exceeds any device of this size
a limit                       the device had enough free memory, but the allocator's limit forbids it
refused                       the device had enough free memory, and the message gives no reason for the failure
fragmentation                 the cache had enough bytes, but no large enough contiguous block
memory outside the framework  without the memory of other processes and libraries the request would fit
real need                     the device is full of live tensors
not told                      the message has no figures
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from memcalc.diagnosis.accounting import Account
from memcalc.diagnosis.report import OutOfMemoryReport
from memcalc.diagnosis.sizes import NOTHING
from memcalc.estimation.outside_allocator import FIRST_GROUP_BYTES
from memcalc.verdict.recorded_errors import reserve_ratio
from memcalc.verdict.run_types import ONE_GPU

# The largest published contexts, kernels included: 1.78 GiB with PyTorch 1.10 and 0.92 GiB with 2.1 on an A100, both
# with all kernels loaded at once (since CUDA 12.2 kernels are loaded on first use, which needs less).
EAGER_CONTEXT_BYTES = 1823 * 2**20
CONTEXT_BYTES = 942 * 2**20

Name = Literal[
    "host memory",
    "larger than the device",
    "a limit",
    "refused",
    "fragmentation",
    "memory outside the framework",
    "real need",
    "not told",
]


class Cause(NamedTuple):
    """The cause of a failed request."""

    name: Name
    fragmented: bool  # whether the cache holds more than in measured healthy runs, regardless of the cause
    outside: int  # bytes outside this process's allocator beyond the usual amount of a training process


def cause_of(report: OutOfMemoryReport, account: Account) -> Cause:
    """Return the first cause that the figures show."""
    outside = _unusual_outside(report, account)
    fragmented = _fragmented(report, account)
    return Cause(_name(report, account, fragmented=fragmented, outside=outside), fragmented, outside)


def _name(report: OutOfMemoryReport, account: Account, *, fragmented: bool, outside: int) -> Name:
    figures, shortfall = report.figures, account.shortfall
    if report.device_type == "cpu":
        return "host memory"
    if account.requested is None:
        return "a limit" if "rejected" in report.wording else "not told"
    if figures.capacity is not None and account.requested.low > figures.capacity.high:
        return "larger than the device"
    if _limited(report, account):
        return "a limit"
    if shortfall is not None and account.available is not None and account.requested.high <= account.available.low:
        return "refused"
    if fragmented and _would_fit_whole(account):
        return "fragmentation"
    if shortfall is not None and outside >= shortfall:
        return "memory outside the framework"
    return "real need" if shortfall is not None or account.live is not None else "not told"


def _limited(report: OutOfMemoryReport, account: Account) -> bool:
    """Return whether a limit, not the device, made the request fail."""
    figures = report.figures
    if "rejected" in report.wording or report.device_type == "mps":
        return True
    if figures.allowed is None or figures.free is None or account.requested is None:
        return False
    return account.requested.high <= figures.free.low


def _would_fit_whole(account: Account) -> bool:
    usable = account.usable_if_contiguous
    return usable is not None and account.requested is not None and account.requested.low <= usable.high


def _fragmented(report: OutOfMemoryReport, account: Account) -> bool:
    """Return whether more is cached than in healthy runs. PyTorch frees unused segments first, so it is fragmented.

    BFC reserves its limit at once, so with it any request that fits into its free memory fails because of
    fragmentation.
    """
    if account.cached is None or account.live is None:
        return False
    if report.framework != "pytorch":
        return _would_fit_whole(account)
    used = account.live.plus(account.private or NOTHING)
    held = used.plus(account.cached)
    # The median of recorded one-GPU runs, not the maximum: at their peak these hold free segments, too, which a failing
    # run has just freed, and the runs that reserve most are fragmented themselves. Of 75 published messages that were
    # checked by hand (tests/diagnosis/messages.yaml) none disagrees with the median; with the maximum, seven would.
    ratio, _ = reserve_ratio((ONE_GPU,))
    return held.low > used.high * ratio


def _unusual_outside(report: OutOfMemoryReport, account: Account) -> int:
    """Return bytes outside this allocator, minus a context and the buffers of one communication group."""
    own = (account.outside or NOTHING).bytes + (account.unexplained or NOTHING).bytes
    usual = EAGER_CONTEXT_BYTES if "1." in report.wording else CONTEXT_BYTES
    return (account.other_processes or NOTHING).bytes + max(0, own - usual - FIRST_GROUP_BYTES)
