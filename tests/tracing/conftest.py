"""Needs torch; and a small notebook that notes what an A100 would have allocated."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from memcalc.allocator import history
from memcalc.events import EventType
from memcalc.spec.hardware.gpus import find_gpu
from memcalc.tracing.session import Session, fake_cuda


class Notebook:
    """What is allocated and reserved now, as torch.cuda.memory_allocated and memory_reserved would say."""

    def __init__(self, session: Session) -> None:
        self.session = session

    @property
    def allocated(self) -> int:
        """Bytes in blocks."""
        gc.collect()
        found = history(self.session.recorder.events())
        return found.allocated[-1] if found.allocated else 0

    @property
    def reserved(self) -> int:
        """Bytes in segments."""
        found = history(self.session.recorder.events())
        return found.reserved[-1] if found.reserved else 0

    def count(self, kind: EventType) -> int:
        """How many events of a kind there were."""
        return sum(event.kind is kind for event in self.session.recorder.events())


@pytest.fixture
def notebook_on() -> Callable[[str], object]:
    """A notebook on a GPU."""

    @contextmanager
    def on(card: str) -> Iterator[Notebook]:
        with fake_cuda(find_gpu(card)) as session:
            yield Notebook(session)

    return on
