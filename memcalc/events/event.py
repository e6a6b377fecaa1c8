"""One event of a running step: an allocation, a free, or a mark between them."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from memcalc.ledger.component import Component

# Values of `stream` for host memory: pageable, and pinned (page-locked, so that the device can access it).
PAGEABLE, PINNED = -1, -2


class EventType(StrEnum):
    """The type of an event, named as in PyTorch's memory history where that has it."""

    ALLOC = "alloc"  # a storage of `bytes` is allocated on `stream`
    FREE = "free"  # the last reference to the storage is released
    FREE_COMPLETED = "free_completed"  # the other streams that used it are done; absent where nothing delays them
    RECORD_STREAM = "record_stream"  # `stream` uses the storage too (Tensor.record_stream)
    EMPTY_CACHE = "empty_cache"  # torch.cuda.empty_cache()
    PHASE = "phase"  # the phase named `phase` begins
    OOM = "oom"  # the recorded run ran out of memory here, requesting `bytes`


class Event(NamedTuple):
    """One event. Fields that `kind` does not need, and unknown attributions, keep their defaults.

    `bytes` are requested bytes, before allocator rounding. A storage's number may be reused once the storage is freed.
    A storage that is resized in place is freed and allocated again.
    """

    kind: EventType
    storage: int = -1
    bytes: int = 0
    stream: int = 0  # 0 is the default stream; others are numbered in the order of their handles
    component: Component | None = None
    phase: str = ""  # as in ledger.phases: "forward_1"
    module: str = ""  # path of the running module: "layers.0.mlp"
    operator: str = ""  # "aten.mm"
    shape: tuple[int, ...] = ()
    dtype: str = ""
    line: str = ""  # of the model's code: "model.py:12"
    time_us: int | None = None  # microseconds since the recording began
