"""DeepSpeed's check of one gradient for infinities and NaNs (DeepSpeed 0.19 runtime/utils.py, has_inf_or_nan)."""

from __future__ import annotations

from memcalc.ledger.component import Component
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.stream.requests import Label, Requests
from memcalc.workspaces.multiprocessors import Multiprocessors
from memcalc.workspaces.reductions import norm

FLAG, FLOAT = DTYPE_BYTES["bool"], DTYPE_BYTES["fp32"]


def check_overflow(
    requests: Requests,
    elements: int,
    width: int,
    card: Multiprocessors,
    *,
    reduces: bool,
    stream: int = 0,
    label: Label = Component.TEMPORARIES,
) -> None:
    """Record the check of one gradient.

    Args:
        requests: where it is recorded.
        elements: of the gradient.
        width: bytes of an element.
        card: the GPU's multiprocessors.
        reduces: whether the gradient is reduced to two numbers first, instead of comparing an fp32 copy of it
            elementwise (before 0.19.6: _has_inf_or_nan).
        stream: the CUDA stream.
        label: of all temporaries.
    """

    def take(size: int) -> int:
        return requests.take(size, stream, label)

    if reduces:
        finite: list[int] = []
        for _ in range(2):  # the largest and the smallest element
            found = take(width)
            requests.drop((requests.play(norm(elements, card), label, stream),))
            equal, absolute, bounded = take(FLAG), take(width), take(FLAG)
            finite.append(take(FLAG))
            requests.drop((bounded, absolute, equal, found))
        both = take(FLAG)
        requests.drop(finite)
        overflows = take(FLAG)
        requests.drop((both, overflows))
        return
    wide = take(elements * FLOAT) if width < FLOAT else take(0)
    nan = take(elements * FLAG)
    absolute = take(elements * FLOAT)
    infinite = take(elements * FLAG)
    requests.drop((absolute,))
    either = take(elements * FLAG)
    numbers = take(elements * FLOAT)
    most = take(FLOAT)
    requests.drop((requests.play(norm(elements, card), label, stream), numbers))
    requests.drop((either, infinite, nan, wide, most))
