"""Modules that follow one another, measured one by one on fake tensors: levels of memory as numbers, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from memcalc.allocator.pytorch.constants import MADE_TO_MEASURE, MIN_BLOCK, SEGMENT_STEP, UNSPLIT_REST
from memcalc.events.event import Event, Kind
from memcalc.spec.cards import find_card
from memcalc.tracing.trace import DEFAULT_CARD

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

    from memcalc.step.module_run import OptimizerFactory


class MeasuredModule(NamedTuple):
    """Bytes of one module's run; a `_top` is the peak, its input included, what lies beside left out.

    Args:
        name: the class's, with its place.
        input_bytes: of the tensor it is given.
        inside_bytes: kept for backward beside input and output.
        output_bytes: of the tensor it makes.
        flops: of matrix products in forward.
        left_bytes: of its parameters' gradients.
        forward_top: of a forward that keeps what backward needs.
        bare_top: of a forward under `torch.utils.checkpoint`.
        backward_top: of backward, from the arrival of the output's gradient.
        again_top: of a checkpoint's second forward and backward, likewise.
    """

    name: str
    input_bytes: int
    inside_bytes: int
    output_bytes: int
    flops: int
    left_bytes: int
    forward_top: int
    bare_top: int
    backward_top: int
    again_top: int


class MeasuredModules(NamedTuple):
    """A chain of them.

    Args:
        modules: in order.
        resident_bytes: parameters, buffers, states of the optimizer, and libraries' workspaces.
        step_top: of the optimizer's step, beside what is resident, the gradients and the first input.
    """

    modules: tuple[MeasuredModule, ...]
    resident_bytes: int
    step_top: int


class _Level(NamedTuple):
    """Of one phase: bytes at its start, at its peak, at its end."""

    start: int
    top: int
    end: int


def measure_modules(
    modules: Sequence[Module], given: Tensor, gpu: str | None = None, optimizer: OptimizerFactory | None = None
) -> MeasuredModules:
    """Each module's forward and backward on fake tensors, by itself and under `torch.utils.checkpoint`.

    Args:
        modules: in order, each of one tensor to one tensor.
        given: the first one's input.
        gpu: the card whose operators run; None: an A100 80 GB.
        optimizer: parameters to an optimizer; None: there is none.

    Raises:
        InputError: a module makes no single tensor, or nothing that has a gradient.
    """
    from memcalc.step.module_chain import AGAIN, BACKWARD, BARE, FORWARD, OPTIMIZER, ChainRun
    from memcalc.tracing.fake import record_fake

    runs: list[ChainRun] = []

    def make(device: torch.device) -> ChainRun:
        runs.append(ChainRun(modules, given, optimizer, device))
        return runs[0]

    recording = record_fake(make, find_card(gpu or DEFAULT_CARD), 1)
    levels = _levels(recording.events)
    found = []
    for number, (module, ends) in enumerate(zip(modules, runs[0].ends, strict=True)):
        forward, backward, bare, again = (levels[f"{kind} {number}"][0] for kind in (FORWARD, BACKWARD, BARE, AGAIN))
        entry, made = _rounded(ends.input_bytes), _rounded(ends.output_bytes)
        beside = forward.start - entry
        found.append(
            MeasuredModule(
                f"{number} {type(module).__name__}",
                entry,
                max(forward.end - forward.start - made, 0),
                made,
                ends.flops,
                sum(map(_rounded, ends.left_bytes)),
                forward.top - beside,
                bare.top - (bare.start - entry),
                backward.top - beside,
                again.top - (bare.start - entry),
            )
        )
    first = found[0].input_bytes
    resident = levels[f"{FORWARD} 0"][0].start - 2 * first  # the chain's input, and that of the first module's run
    if optimizer is None:
        return MeasuredModules(tuple(found), resident, 0)
    one, two = levels[OPTIMIZER]
    return MeasuredModules(tuple(found), resident + two.start - one.start, two.top - two.start)


def _levels(events: Iterable[Event]) -> dict[str, list[_Level]]:
    """What was allocated in each phase, blocks rounded as the allocator rounds them."""
    levels: dict[str, list[_Level]] = {}
    sizes: dict[int, int] = {}
    level = start = top = 0
    phase = ""
    for event in events:
        if event.kind is Kind.PHASE:
            if phase:
                levels.setdefault(phase, []).append(_Level(start, top, level))
            phase, start, top = event.phase, level, level
        elif event.kind is Kind.ALLOC:
            sizes[event.storage] = _rounded(event.bytes)
            level += sizes[event.storage]
            top = max(top, level)
        elif event.kind is Kind.FREE:
            level -= sizes.pop(event.storage)
    levels.setdefault(phase, []).append(_Level(start, top, level))
    return levels


def _rounded(amount: int) -> int:
    """The block that the allocator gives; from 10 MiB on a segment of its own, whose small rest stays with it."""
    request = -(-amount // MIN_BLOCK) * MIN_BLOCK
    segment = -(-amount // SEGMENT_STEP) * SEGMENT_STEP
    return segment if request >= MADE_TO_MEASURE and segment - request <= UNSPLIT_REST else request
