"""What observers of every device share: which tensors can be named during a phase, and the log of phases."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from memcalc.ledger.component import Component
from memcalc.ledger.phases import SETUP_PHASES
from memcalc.measuring.measurement import Holding, MeasuredPhase
from memcalc.step.loop import TrainingRun

DTYPE_WORDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

# These appear or disappear inside a phase, so only what was there when it began is sure to be part of its peak.
FLEETING = (Component.GRADIENTS, Component.LOGITS_AND_LOSS)


def holdings(run: TrainingRun) -> tuple[Holding, ...]:
    """The storages that a run can name now, by component and dtype, each storage once."""
    seen: set[int] = {0}  # a tensor without elements has no storage
    sizes: Counter[tuple[str, str]] = Counter()
    elements: Counter[tuple[str, str]] = Counter()
    for component, tensors in run.held().items():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            key = (component.value, DTYPE_WORDS.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")))
            sizes[key] += storage.nbytes()
            elements[key] += storage.nbytes() // tensor.element_size()
    return tuple(Holding(*key, elements[key], sizes[key]) for key in sizes)


def certain(phase: str, start: tuple[Holding, ...], end: tuple[Holding, ...]) -> tuple[Holding, ...]:
    """What was alive at a phase's peak for certain, of what was there at its start and at its end."""
    if phase in SETUP_PHASES:
        return end
    fleeting = [holding for holding in start if holding.component in FLEETING]
    return tuple(fleeting + [holding for holding in end if holding.component not in FLEETING])


class Log:
    """Phases in the order in which they first ran."""

    def __init__(self) -> None:
        self._phases: dict[str, MeasuredPhase] = {}

    def add(self, phase: MeasuredPhase) -> None:
        """Keep a phase. Of the micro-batches of one step the highest counts, and where the last one ended."""
        before = self._phases.get(phase.name)
        if before is not None and before.peak_allocated_bytes > phase.peak_allocated_bytes:
            phase = replace(phase, peak_allocated_bytes=before.peak_allocated_bytes, held=before.held)
        self._phases[phase.name] = phase

    @property
    def phases(self) -> tuple[MeasuredPhase, ...]:
        """All phases so far."""
        return tuple(self._phases.values())
