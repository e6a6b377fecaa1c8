"""Sequential modules, measured one at a time on fake tensors; the results are numbers, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from memcalc.allocator.pytorch.constants import MADE_TO_MEASURE, MIN_BLOCK, SEGMENT_STEP, UNSPLIT_REST
from memcalc.events.event import Event, EventType
from memcalc.spec.hardware.gpus import DEFAULT_CARD, find_gpu

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

    from memcalc.step.module_run import OptimizerFactory


class MeasuredModule(NamedTuple):
    """Bytes of one module's run. A `_top` is a peak, with the module's input and without other live tensors."""

    name: str  # position and class of the module
    input_bytes: int  # bytes of its input tensor
    inside_bytes: int  # bytes saved for backward, without input and output
    output_bytes: int  # bytes of its output tensor
    flops: int  # FLOPs of forward's matmuls
    left_bytes: int  # bytes of its parameters' gradients
    forward_top: int  # peak of a forward that saves for backward
    bare_top: int  # peak of a forward under `torch.utils.checkpoint`
    backward_top: int  # peak of backward, from the output's gradient on
    again_top: int  # peak of a checkpoint's recomputation and backward, from the output's gradient on


class MeasuredModules(NamedTuple):
    """A chain of measured modules."""

    modules: tuple[MeasuredModule, ...]  # in order
    resident_bytes: int  # bytes of parameters, buffers, optimizer states and library workspaces
    step_top: int  # peak of the optimizer step, without resident bytes, gradients and the first input


class _Level(NamedTuple):
    """Bytes of one phase: at its start, its peak and its end."""

    start: int
    top: int
    end: int


def measure_modules(
    modules: Sequence[Module], given: Tensor, gpu: str | None = None, optimizer: OptimizerFactory | None = None
) -> MeasuredModules:
    """Measure each module's forward and backward on fake tensors, with saved activations and checkpointed.

    Args:
        modules: in order, each from one tensor to one tensor.
        given: input of the first module.
        gpu: the GPU to emulate; None: an A100 80 GB.
        optimizer: parameters to an optimizer; None: no optimizer.

    Raises:
        InputError: a module does not return a single tensor, or its output has no gradient.
    """
    from memcalc.step.module_chain import AGAIN, BACKWARD, BARE, FORWARD, OPTIMIZER, ChainRun
    from memcalc.tracing.fake import record_fake

    runs: list[ChainRun] = []

    def make(device: torch.device) -> ChainRun:
        runs.append(ChainRun(modules, given, optimizer, device))
        return runs[0]

    recording = record_fake(make, find_gpu(gpu or DEFAULT_CARD), 1)
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
    """Return the allocated bytes of each phase, with blocks rounded as by the allocator."""
    levels: dict[str, list[_Level]] = {}
    sizes: dict[int, int] = {}
    level = start = top = 0
    phase = ""
    for event in events:
        if event.kind is EventType.PHASE:
            if phase:
                levels.setdefault(phase, []).append(_Level(start, top, level))
            phase, start, top = event.phase, level, level
        elif event.kind is EventType.ALLOC:
            sizes[event.storage] = _rounded(event.bytes)
            level += sizes[event.storage]
            top = max(top, level)
        elif event.kind is EventType.FREE:
            level -= sizes.pop(event.storage)
    levels.setdefault(phase, []).append(_Level(start, top, level))
    return levels


def _rounded(amount: int) -> int:
    """Return the block size; from 10 MiB on a dedicated segment, which keeps a small unsplit remainder."""
    request = -(-amount // MIN_BLOCK) * MIN_BLOCK
    segment = -(-amount // SEGMENT_STEP) * SEGMENT_STEP
    return segment if request >= MADE_TO_MEASURE and segment - request <= UNSPLIT_REST else request
