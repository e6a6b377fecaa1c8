"""Watching a run on a GPU, through the counters of PyTorch's caching allocator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from memcalc.measuring.measurement import MeasuredPhase
from memcalc.measuring.observing import Log, certain, holdings
from memcalc.step.loop import TrainingRun


class CudaObserver:
    """Reads the allocator's counters when phases begin and end. They are kept on the host: nothing is synchronised."""

    def __init__(self, run: TrainingRun) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call] # the counters exist from here on
        self.run = run
        self.log = Log()

    def watching(self) -> AbstractContextManager[None]:
        """Entered around the whole run; the allocator counts anyway."""
        return nullcontext()

    @property
    def phases(self) -> tuple[MeasuredPhase, ...]:
        """What was seen, the phase that failed included."""
        return self.log.phases

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `Observer`."""
        device = self.run.device
        start = holdings(self.run)
        torch.cuda.reset_peak_memory_stats(device)
        try:
            yield
        finally:
            free, total = torch.cuda.mem_get_info(device)
            self.log.add(
                MeasuredPhase(
                    name=name,
                    peak_allocated_bytes=torch.cuda.max_memory_allocated(device),
                    end_allocated_bytes=torch.cuda.memory_allocated(device),
                    reserved_bytes=torch.cuda.memory_reserved(device),
                    peak_reserved_bytes=torch.cuda.max_memory_reserved(device),
                    device_bytes=total - free,
                    held=certain(name, start, holdings(self.run)),
                )
            )
