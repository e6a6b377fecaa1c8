"""A block as streams of allocations and releases, evaluated for given sizes: what it saves, and its highest moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

from memcalc.ledger.component import Component
from memcalc.spec.recipes import DTYPE_BYTES

Stream = Literal["forward", "loss", "backward"]

HEAD = "lm_head"  # the module of the output projection


class Table(NamedTuple):
    """A tensor that the model makes once in each forward and layers read: a mask, a rotary table.

    Args:
        name: of the table, of which layers with a sliding window may have their own.
        windows: which layers read it: those with a window (True), those without (False), all (None).
    """

    name: str
    windows: bool | None = None


class Storage(NamedTuple):
    """A kind of tensor.

    Args:
        name: as it is shown. Nothing is decided by it.
        shape: its axes in symbols.
        dtype: its dtype.
        citation: its source.
        rule: bytes where they are no product of the axes.
        component: that its bytes count for.
        parameter: of a parameter's gradient, the parameter as state_dict names it in its unit.
        table: of a table of the model, which one.
    """

    name: str
    shape: tuple[str, ...]
    dtype: str
    citation: str
    rule: Callable[[Mapping[str, int]], int] | None = None
    component: Component | None = None
    parameter: str = ""
    table: Table | None = None

    @property
    def formula(self) -> str:
        """Bytes of one such tensor in symbols, e.g. "2·b·s·d"."""
        if self.rule is not None:
            return (self.rule.__doc__ or "rule").partition("\n")[0].rstrip(".")
        return "·".join((str(DTYPE_BYTES[self.dtype]), *(f"({axis})" if "+" in axis else axis for axis in self.shape)))


class Kind(NamedTuple):
    """Storages of one size: a product of axes and an item's bytes, or a rule with its arguments."""

    axes: tuple[str, ...]
    item_bytes: int
    rule: Callable[..., int] | None = None
    arguments: tuple[tuple[str, object], ...] = ()

    def bytes(self, values: Mapping[str, int]) -> int:
        """Bytes of one such tensor."""
        if self.rule is not None:
            return self.rule(values, **dict(self.arguments))
        size = self.item_bytes
        for axis in self.axes:
            size *= values[axis]
        return size


def _kind(storage: Storage) -> Kind:
    rule = storage.rule
    if rule is None:
        return Kind(storage.shape, DTYPE_BYTES[storage.dtype])
    if isinstance(rule, partial):  # two partials with the same arguments are not equal
        return Kind((), 1, rule.func, tuple(rule.keywords.items()))
    return Kind((), 1, rule)


class When(Enum):
    """What a block is doing."""

    START = auto()  # it is given its input
    RUN = auto()  # an operator's forward, or its backward
    AGAIN = auto()  # an operator that a checkpoint runs again
    FETCH = auto()  # a checkpoint's inputs come from the host
    END = auto()  # it hands on its output, or the gradient of its input


class Operator(NamedTuple):
    """An operator of a block, as its events know it.

    Args:
        name: as it is shown. Nothing is decided by it.
        when: whether it runs for the first time, or again; of events outside of operators, what the block is doing.
        position: on the block's tape.
        module: the module whose parameters it reads, as state_dict names it in its unit; empty: none.
        output: the storage of its first result.
        multiplies: whether cuBLAS runs it.
        in_head: whether it belongs to the language-model head or to the loss, behind the model's last norm.
        in_loss: whether it runs when the model's forward has returned.
    """

    name: str
    when: When = When.RUN
    position: int = -1
    module: str = ""
    output: int = -1
    multiplies: bool = False
    in_head: bool = False
    in_loss: bool = False

    @property
    def label(self) -> str:
        """What a screen calls it."""
        return f"{self.name} again" if self.when is When.AGAIN else self.name


START, FETCH, END = Operator("start", When.START), Operator("recompute", When.FETCH), Operator("end", When.END)


class Event(NamedTuple):
    """An allocation (+1) or a release (-1) of one storage, inside an operator."""

    storage: int
    sign: int
    operator: Operator


class Moment(NamedTuple):
    """The highest point of a stream: bytes above its start, and how many events in it is."""

    bytes: int
    position: int


@dataclass(frozen=True, eq=False)
class Program:
    """One block, compiled.

    `forward` (and `loss`, for the head) ends with what backward needs, with `names`, which the model's forward lets go
    as it returns, and with `region`, which the end of the autocast region lets go; `backward` starts from there, with
    the incoming gradient as its first event.
    """

    storages: tuple[Storage, ...]
    forward: tuple[Event, ...]
    loss: tuple[Event, ...]
    backward: tuple[Event, ...]
    region: tuple[int, ...] = ()
    names: tuple[int, ...] = ()
    packed: tuple[int, ...] = ()  # what it keeps on the host between forward and backward
    named_output: tuple[int, ...] = ()  # its output, if it is one of `names`, though the next block's
    handed: tuple[int, ...] = ()  # what it returns beside it, named until the next layer has returned, if not kept
    read_by: tuple[tuple[int, str], ...] = ()  # what it keeps for layers that run again alone, and which these are
    reads: tuple[tuple[str, int], ...] = ()  # tables of the model, and how many events of backward until they are read
    checkpoint_end: int = -1  # how many events of backward until a checkpoint of the whole block has gone
    held: tuple[int, ...] = ()  # what lives until backward has passed: of the block that opens the model, its tables
    output: int = -1  # what it hands on; -1: the head, which ends with the loss
    tied_gradient: int = -1  # of the head: the gradient of the table that it shares with the embedding
    tied_sum: int = -1  # of the embedding: the sum of both, where it is a tensor of its own

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The distinct sizes that its storages have: each is computed once."""
        return tuple(self._kinds)

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """Which of `kinds` each storage is."""
        return tuple(self._kinds[_kind(storage)] for storage in self.storages)

    @cached_property
    def _kinds(self) -> dict[Kind, int]:
        kinds: dict[Kind, int] = {}
        for storage in self.storages:
            kinds.setdefault(_kind(storage), len(kinds))
        return kinds

    @cached_property
    def labels(self) -> tuple[tuple[Component, str, str, str, str], ...]:
        """Each storage's component, name, dtype, formula and citation."""
        return tuple(
            (storage.component or Component.TEMPORARIES, storage.name, storage.dtype, storage.formula, storage.citation)
            for storage in self.storages
        )

    def stream(self, name: Stream) -> tuple[Event, ...]:
        """One of its streams."""
        return {"forward": self.forward, "loss": self.loss, "backward": self.backward}[name]

    @cached_property
    def entry(self) -> int:
        """The storage of the block's input, the first thing that is there when its forward begins."""
        return next(event.storage for event in self.forward if event.operator.when is When.START)

    @cached_property
    def first_product(self) -> int:
        """How many events of backward there are until its first matrix product has made something."""
        events = enumerate(self.backward, 1)
        return next((at for at, event in events if event.operator.multiplies), len(self.backward) + 1)

    @cached_property
    def gradients(self) -> frozenset[int]:
        """The positions in backward at which a parameter's gradient is made."""
        return frozenset(
            position
            for position, event in enumerate(self.backward, 1)
            if event.sign > 0 and self.storages[event.storage].component is Component.GRADIENTS
        )

    def sizes(self, values: Mapping[str, int]) -> list[int]:
        """Bytes of each storage, as the program asks for them (not rounded)."""
        of_kind = [kind.bytes(values) for kind in self.kinds]
        return [of_kind[kind] for kind in self.kind_of]

    def shapes(self, values: Mapping[str, int]) -> list[tuple[int, ...]]:
        """The axes' sizes of each storage; empty for those of a rule."""
        of_kind = [tuple([values[axis] for axis in kind.axes]) for kind in self.kinds]
        return [of_kind[kind] for kind in self.kind_of]

    @cached_property
    def findings(self) -> dict[object, Any]:
        """What others have found out about it, kept as long as it is."""
        return {}

    @cached_property
    def _alive(self) -> dict[tuple[Stream, int], tuple[int, ...]]:
        return {}

    def alive(self, stream: Stream, position: int) -> tuple[int, ...]:
        """The storages alive after so many events of "forward", "loss" or "backward"; found once for each position."""
        key = (stream, position)
        if key not in self._alive:
            start = {"forward": (), "loss": self.after_forward, "backward": self.kept}[stream]
            self._alive[key] = alive_after(self.stream(stream)[:position], start)
        return self._alive[key]

    @cached_property
    def after_forward(self) -> tuple[int, ...]:
        """The storages alive until the model's forward returns."""
        return alive_after(self.forward)

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """The storages alive in the loss and at its end, inside the autocast region."""
        return tuple(index for index in alive_after((*self.forward, *self.loss)) if index not in self.names)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The storages alive when backward starts."""
        return tuple(index for index in self.saved if index not in self.region)

    @cached_property
    def awaited(self) -> tuple[int, ...]:
        """Of a head: the storages that the gradient of its matrix needs, the matrix's input and its output's gradient.

        All that is kept, where the loss cuts the product into pieces.
        """
        used = [
            event.storage
            for event in self.backward
            if event.sign < 0 and event.operator.module == HEAD and event.operator.when is When.RUN
        ]
        return tuple(used) if any(storage in self.kept for storage in used) else self.kept

    @cached_property
    def left(self) -> tuple[int, ...]:
        """The storages that backward leaves behind: gradients of parameters, and what the step still holds."""
        return alive_after(self.backward, self.kept)

    @cached_property
    def left_without_gradients(self) -> tuple[int, ...]:
        """The same without gradients of parameters."""
        return tuple(index for index in self.left if self.storages[index].component is not Component.GRADIENTS)


def highest(events: Iterable[Event], sizes: list[int], since: int = 0) -> Moment:
    """The highest point of a stream; `since`: at this event or later, also where all is below the start."""
    current = 0
    best, position = 0, since
    begun = not since
    for index, (storage, sign, _) in enumerate(events, 1):
        if sign > 0:
            current += sizes[storage]
            if index >= since and (current > best or not begun):
                best, position, begun = current, index, True
        else:
            current -= sizes[storage]
    return Moment(best, position)


def highest_among(events: Iterable[Event], sizes: list[int], positions: frozenset[int]) -> Moment:
    """The highest of some positions of a stream, of which there is at least one."""
    current = 0
    heights: dict[int, int] = {}
    for index, (storage, sign, _) in enumerate(events, 1):
        current += sign * sizes[storage]
        if index in positions:
            heights[index] = current
    position = max(heights, key=heights.__getitem__)
    return Moment(heights[position], position)


def alive_after(events: Iterable[Event], start: Iterable[int] = ()) -> tuple[int, ...]:
    """The storages alive after a stream that starts with those of `start`."""
    alive = dict.fromkeys(start)
    for storage, sign, _ in events:
        if sign > 0:
            alive[storage] = None
        else:
            alive.pop(storage, None)
    return tuple(alive)
