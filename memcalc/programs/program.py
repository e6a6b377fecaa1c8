"""Program of a block: streams of allocations and frees, evaluated for given sizes, with saved tensors and peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property, partial
from math import prod
from typing import Literal, NamedTuple

from memcalc.ledger.component import Component
from memcalc.spec.recipes import DTYPE_BYTES

Stream = Literal["forward", "loss", "backward"]

HEAD = "lm_head"  # the module of the output projection


class SharedTable(NamedTuple):
    """A tensor that the model computes once per forward and all layers read: a mask, a RoPE cos/sin cache."""

    name: str  # its name; layers with a sliding window may have a separate one
    windows: bool | None = None  # the layers that read it: with a window (True), without (False), all (None)


class Storage(NamedTuple):
    """One type of tensor in a block."""

    name: str  # for display only
    shape: tuple[str, ...]  # its axes in symbols
    dtype: str  # its dtype
    citation: str  # its source
    rule: Callable[[Mapping[str, int]], int] | None = None  # its bytes, where they are not a product of the axes
    component: Component | None = None  # the component that its bytes count for
    parameter: str = ""  # for a parameter's gradient, the parameter's state_dict name within its unit
    table: SharedTable | None = None  # for a tensor shared by layers, which one

    @property
    def formula(self) -> str:
        """Bytes of one such tensor in symbols, e.g. "2·b·s·d"."""
        if self.rule is not None:
            return (self.rule.__doc__ or "rule").partition("\n")[0].rstrip(".")
        return "·".join((str(DTYPE_BYTES[self.dtype]), *(f"({axis})" if "+" in axis else axis for axis in self.shape)))


class StorageSize(NamedTuple):
    """Storages of one size: a product of axes and an item's bytes, or a rule with its arguments."""

    axes: tuple[str, ...]
    item_bytes: int
    rule: Callable[..., int] | None = None
    arguments: tuple[tuple[str, object], ...] = ()

    def bytes(self, values: Mapping[str, int]) -> int:
        """Return the bytes of one such tensor."""
        if self.rule is not None:
            return self.rule(values, **dict(self.arguments)) if self.arguments else self.rule(values)
        return prod(map(values.__getitem__, self.axes), start=self.item_bytes)


def _kind(storage: Storage) -> StorageSize:
    rule = storage.rule
    if rule is None:
        return StorageSize(storage.shape, DTYPE_BYTES[storage.dtype])
    if isinstance(rule, partial):  # two partials with the same arguments are not equal
        return StorageSize((), 1, rule.func, tuple(rule.keywords.items()))
    return StorageSize((), 1, rule)


class Activity(Enum):
    """State of a block at an event."""

    START = auto()  # it receives its input
    RUN = auto()  # an operator's forward, or its backward
    AGAIN = auto()  # a checkpoint recomputes an operator
    FETCH = auto()  # a checkpoint's inputs are copied back from the host
    END = auto()  # it passes on its output, or the gradient of its input


class BlockOperator(NamedTuple):
    """An operator of a block, as recorded in its events."""

    name: str  # for display only
    when: Activity = Activity.RUN  # first run or recomputation; for events outside operators, what the block is doing
    position: int = -1  # its position on the block's tape
    module: str = ""  # the module of the parameters that it reads, as in state_dict within its unit; empty: none
    output: int = -1  # the storage of its first result
    multiplies: bool = False  # whether it is a cuBLAS matmul
    written: int = -1  # the storage that backward's first matmul writes; -1: the first one that backward allocates
    in_head: bool = False  # whether it belongs to the LM head or the loss, after the final norm
    in_loss: bool = False  # whether it runs after the model's forward has returned
    kernel: str = ""  # the function that torch.compile compiles for it; empty: none
    buffer: str = ""  # a persistent buffer that its first run allocates before it; empty: none

    @property
    def label(self) -> str:
        """Its label on screens."""
        return f"{self.name} again" if self.when is Activity.AGAIN else self.name


START, FETCH, END = (
    BlockOperator("start", Activity.START),
    BlockOperator("recompute", Activity.FETCH),
    BlockOperator("end", Activity.END),
)


class StorageEvent(NamedTuple):
    """An allocation (+1) or a free (-1) of one storage, inside an operator."""

    storage: int
    sign: int
    operator: BlockOperator


class StreamPeak(NamedTuple):
    """The peak of a stream: bytes above its start, and the number of events up to it."""

    bytes: int
    position: int


@dataclass(frozen=True, eq=False)
class Program:
    """One compiled block.

    `forward` (and `loss`, for the LM head) ends with what backward needs, plus `names`, freed when the model's forward
    returns, and `region`, freed at the end of the autocast region. `backward` starts from there; its first event is the
    incoming gradient.
    """

    storages: tuple[Storage, ...]
    forward: tuple[StorageEvent, ...]
    loss: tuple[StorageEvent, ...]
    backward: tuple[StorageEvent, ...]
    region: tuple[int, ...] = ()
    names: tuple[int, ...] = ()
    packed: tuple[int, ...] = ()  # storages kept in host memory between forward and backward
    # further outputs that are not saved: referenced by a Python variable until the next layer returns
    handed: tuple[int, ...] = ()
    read_by: tuple[tuple[int, str], ...] = ()  # storages kept for recomputed layers, and which layers read them
    # tensors shared by layers -> number of backward events until they have been read
    reads: tuple[tuple[str, int], ...] = ()
    checkpoint_end: int = -1  # number of backward events until the block's checkpoint is freed; -1: none
    held: tuple[int, ...] = ()  # live until backward has passed: the first block's tensors shared by layers
    output: int = -1  # its output; -1: the LM head, which ends with the loss
    output_is_leaf: bool = False  # whether the output is set to require a gradient
    tied_gradient: int = -1  # LM head: the gradient of the weight tied to the embedding
    tied_sum: int = -1  # embedding: the sum of both gradients, where it is a separate tensor

    @cached_property
    def kinds(self) -> tuple[StorageSize, ...]:
        """The distinct sizes of its storages; each is computed once."""
        return tuple(self._kinds)

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """Index into `kinds` of each storage."""
        return tuple(self._kinds[_kind(storage)] for storage in self.storages)

    def size_of(self, storage: int) -> StorageSize:
        """Return the size of a storage in symbols."""
        return self.kinds[self.kind_of[storage]]

    @cached_property
    def _kinds(self) -> dict[StorageSize, int]:
        kinds: dict[StorageSize, int] = {}
        for storage in self.storages:
            kinds.setdefault(_kind(storage), len(kinds))
        return kinds

    @cached_property
    def labels(self) -> tuple[tuple[Component, str, str, str, str], ...]:
        """Component, name, dtype, formula and citation of each storage."""
        return tuple(
            (storage.component or Component.TEMPORARIES, storage.name, storage.dtype, storage.formula, storage.citation)
            for storage in self.storages
        )

    def stream(self, name: Stream) -> tuple[StorageEvent, ...]:
        """Return the requests of forward, of the loss or of backward."""
        return {"forward": self.forward, "loss": self.loss, "backward": self.backward}[name]

    @cached_property
    def entry(self) -> int:
        """The storage of the block's input, the first one live in forward."""
        return next(event.storage for event in self.forward if event.operator.when is Activity.START)

    def sizes(self, values: Mapping[str, int]) -> list[int]:
        """Return the requested bytes of each storage, not rounded."""
        of_kind = [size_class.bytes(values) for size_class in self.kinds]
        return [of_kind[kind] for kind in self.kind_of]

    def shapes(self, values: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Return the sizes of the axes of each storage; empty where a rule gives the bytes."""
        of_kind = [tuple([values[axis] for axis in size_class.axes]) for size_class in self.kinds]
        return [of_kind[kind] for kind in self.kind_of]

    @cached_property
    def _live(self) -> dict[tuple[Stream, int], tuple[int, ...]]:
        return {}

    def alive(self, stream: Stream, position: int) -> tuple[int, ...]:
        """Return the storages that are live after the first N events of a stream; cached by position."""
        key = (stream, position)
        if key not in self._live:
            start = {"forward": (), "loss": self.after_forward, "backward": self.kept}[stream]
            self._live[key] = live_storages_after(self.stream(stream)[:position], start)
        return self._live[key]

    @cached_property
    def after_forward(self) -> tuple[int, ...]:
        """Storages live until the model's forward returns."""
        return live_storages_after(self.forward)

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """Storages live during the loss and at its end, inside the autocast region."""
        return tuple(index for index in live_storages_after((*self.forward, *self.loss)) if index not in self.names)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """Storages live when backward starts."""
        return tuple(index for index in self.saved if index not in self.region)

    @cached_property
    def awaited(self) -> tuple[int, ...]:
        """LM head: the storages that its weight gradient needs, namely the matmul's input and its output's gradient.

        All kept storages, where the loss splits the matmul into chunks.
        """
        used = [
            event.storage
            for event in self.backward
            if event.sign < 0 and event.operator.module == HEAD and event.operator.when is Activity.RUN
        ]
        return tuple(used) if any(storage in self.kept for storage in used) else self.kept

    @cached_property
    def left(self) -> tuple[int, ...]:
        """Storages that backward leaves allocated: parameter gradients, and what the step still holds."""
        return live_storages_after(self.backward, self.kept)

    @cached_property
    def left_without_gradients(self) -> tuple[int, ...]:
        """Storages that backward leaves allocated, without parameter gradients."""
        return tuple(index for index in self.left if self.storages[index].component is not Component.GRADIENTS)


def highest(events: Iterable[StorageEvent], sizes: list[int]) -> StreamPeak:
    """Return the peak of a stream: the first of equal ones, or its start where nothing is higher."""
    current = best = position = 0
    for index, (storage, sign, _) in enumerate(events, 1):
        current += sign * sizes[storage]
        if current > best:
            best, position = current, index
    return StreamPeak(best, position)


def live_storages_after(events: Iterable[StorageEvent], start: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the storages live after a stream that starts with the storages of `start`."""
    alive = dict.fromkeys(start)
    for storage, sign, _ in events:
        if sign > 0:
            alive[storage] = None
        else:
            alive.pop(storage, None)
    return tuple(alive)
