"""One event of a running step: memory asked for, memory given back, and the marks between them."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from memcalc.ledger.component import Component

# In place of a stream, of memory that is the host's: any, and pages that are locked for the device to reach them.
PAGEABLE, PINNED = -1, -2


class Kind(StrEnum):
    """What happened. The words are those of PyTorch's memory history, where it has one."""

    ALLOC = "alloc"  # a storage of `bytes` came to life on `stream`
    FREE = "free"  # its last owner let it go
    FREE_COMPLETED = "free_completed"  # the other streams that used it are done; absent where nothing delays them
    RECORD_STREAM = "record_stream"  # `stream` uses the storage too (Tensor.record_stream)
    EMPTY_CACHE = "empty_cache"  # torch.cuda.empty_cache()
    PHASE = "phase"  # the phase named `phase` begins
    OOM = "oom"  # the run that was recorded died here, asking for `bytes`


class Event(NamedTuple):
    """One event; what `kind` does not need is left at its default, and so is every attribution that is not known.

    `bytes` are those asked for: what an allocator adds to them is its own affair. A storage's number may be used again
    once it is freed. A storage that is resized in place is freed and comes to life again.
    """

    kind: Kind
    storage: int = -1
    bytes: int = 0
    stream: int = 0  # 0 is the default stream; others in the order of their handles
    component: Component | None = None
    phase: str = ""  # as in ledger.phases: "forward_1"
    module: str = ""  # path of the module that ran: "layers.0.mlp"
    operator: str = ""  # "aten.mm"
    shape: tuple[int, ...] = ()
    dtype: str = ""
    line: str = ""  # of the model's code: "model.py:12"
    time_us: int | None = None  # microseconds since the recording began
