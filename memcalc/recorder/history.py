"""A run on a CUDA device, recorded with the PyTorch allocator's history: every block, including those inside operators.

The history has all blocks but not their owners. The recorder knows operators, modules and lines, but not the blocks
that operators allocate internally. Before each operator the recorder writes the operator's number into the history
("user metadata", torch 2.10 and later), so that both are joined exactly, without comparing times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memcalc.errors import Unavailable
from memcalc.events.event import Event, EventType
from memcalc.ledger.component import Component
from memcalc.recorder.attribution import OperatorLocation
from memcalc.recorder.kernels import Kernels
from memcalc.recorder.recorder import RESIZED, Recorder, dtype_name, line_of
from memcalc.recorder.storages import Number

ENTRIES = 20_000_000  # of the history's ring buffer, more than a few steps of the largest model need

OUTSIDE = 0  # operator number between operators


class NumberedOperators(Kernels):
    """Runs operators unchanged, each with its number in the history."""

    def __init__(self) -> None:
        self.phase = 0
        self.operator = OUTSIDE

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the operator's outputs; the history records its number meanwhile."""
        self.operator += 1
        _note(self.phase, self.operator)
        try:
            return operator(*args, **kwargs)
        finally:
            _note(self.phase, OUTSIDE)


class BlockOwner(NamedTuple):
    """The recorder's facts about a block."""

    number: Number
    operator: str
    place: OperatorLocation
    shape: tuple[int, ...]
    dtype: torch.dtype
    phase: str


class HistoryRecorder(Recorder):  # type: ignore[no-untyped-call] # the mode's __init_subclass__
    """A recorder that takes its blocks from the allocator's history.

    Args:
        device: a CUDA device, real or null.

    Raises:
        Unavailable: this PyTorch cannot write metadata into its history.
    """

    def __init__(self, device: torch.device) -> None:
        if not hasattr(torch._C, "_cuda_setMemoryMetadata"):  # noqa: SLF001 -- no public name, as all of it here
            raise Unavailable(f"trace on a CUDA device needs torch 2.10 or newer; this is {torch.__version__}.")
        self.numbering = NumberedOperators()
        super().__init__(self.numbering, counts=_on_cuda)
        self.device = device
        self._phases: list[str] = []
        self._operators: dict[int, tuple[str, OperatorLocation, str]] = {}
        self._owners: dict[tuple[int, int], BlockOwner] = {}  # by operator number and address
        torch.cuda.memory._record_memory_history("all", None, "python", ENTRIES)  # noqa: SLF001

    def begin_phase(self, name: str) -> None:
        """Begin a phase, and record it in the history."""
        super().begin_phase(name)
        self._phases.append(name)
        self.numbering.phase = len(self._phases)
        _note(self.numbering.phase, OUTSIDE)

    def _look_at(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, node: int) -> None:
        place = self.places.here(node)
        self._operators[self.numbering.operator] = (self.name_of(operator), place, self.phase)
        super()._look_at(operator, args, kwargs, output, node)

    def _allocated(self, number: Number, tensor: Tensor, name: str, place: OperatorLocation) -> None:
        key = (self.numbering.operator, tensor.untyped_storage().data_ptr())
        self._owners[key] = BlockOwner(number, name, place, tuple(tensor.shape), tensor.dtype, self.phase)
        self.purposes.born(number, self.phase, place)

    def _resize(self, resize: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.numbering.run(resize, args, kwargs)

    def _resized_storage(self, number: Number, storage: torch.UntypedStorage, place: OperatorLocation) -> None:
        key = (self.numbering.operator, storage.data_ptr())
        self._owners[key] = BlockOwner(number, RESIZED, place, (storage.nbytes(),), torch.uint8, self.phase)
        self.purposes.born(number, self.phase, place)

    def _ended(self, number: Number) -> None:
        self.purposes.freed(number)

    def events(self) -> tuple[Event, ...]:
        """Return the allocator's history as attributed events."""
        torch.cuda.synchronize(self.device)
        snapshot = torch.cuda.memory._snapshot(self.device)  # noqa: SLF001
        history = snapshot["device_traces"][self.device.index or 0]
        return tuple(self._told(history))

    def _told(self, history: list[dict[str, Any]]) -> Iterator[Event]:
        purposes = self.purposes.settled()
        numbers: dict[int, Number] = {}
        fresh = count()
        phases = iter(enumerate(self._phases, start=1))
        told = 0
        start = history[0]["time_us"] if history else 0
        last = _last_allocations(history)
        for position, entry in enumerate(history):
            phase, operator = _noted(entry)
            now = entry["time_us"] - start
            while told < phase:
                told, name = next(phases)
                yield Event(EventType.PHASE, phase=name, time_us=now)
            action, address = entry["action"], entry.get("addr", -1)
            if action == "alloc":
                numbers[address] = next(fresh)
                yield self._block(entry, numbers[address], operator, purposes, now, never_freed=position in last)
            elif action == "free_completed" and address in numbers:
                yield Event(EventType.FREE, numbers.pop(address), time_us=now)
            elif action == "oom":
                yield Event(EventType.OOM, bytes=entry["size"], phase=self._phases[phase - 1], time_us=now)
        for _, name in phases:
            yield Event(EventType.PHASE, phase=name)

    def _block(
        self,
        entry: dict[str, Any],
        number: Number,
        operator: int,
        purposes: dict[Number, Component],
        now: int,
        *,
        never_freed: bool,
    ) -> Event:
        size = entry["size"]
        owner = self._owners.get((operator, entry["addr"]))
        if owner is not None:
            return Event(
                EventType.ALLOC,
                number,
                size,
                stream=0,
                component=purposes[owner.number],
                phase=owner.phase,
                module=owner.place.module,
                operator=owner.operator,
                shape=owner.shape,
                dtype=dtype_name(owner.dtype),
                line=line_of(owner.place),
                time_us=now,
            )
        name, place, phase = self._operators.get(operator, ("", OperatorLocation(), self._phases[_noted(entry)[0] - 1]))
        component = Component.LIBRARY_WORKSPACE if never_freed else Component.TEMPORARIES
        return Event(
            EventType.ALLOC,
            number,
            size,
            component=component,
            phase=phase,
            module=place.module,
            operator=name,
            shape=(size,),
            dtype="uint8",
            line=line_of(place),
            time_us=now,
        )


def _note(phase: int, operator: int) -> None:
    torch._C._cuda_setMemoryMetadata(f"{phase} {operator}")  # noqa: SLF001


def _noted(entry: dict[str, Any]) -> tuple[int, int]:
    phase, _, operator = (entry.get("user_metadata") or "0 0").partition(" ")
    return int(phase), int(operator)


def _last_allocations(history: list[dict[str, Any]]) -> frozenset[int]:
    """Return the positions of the allocations that are never freed."""
    alive: dict[int, int] = {}
    for position, entry in enumerate(history):
        if entry["action"] == "alloc":
            alive[entry["addr"]] = position
        elif entry["action"] == "free_completed":
            alive.pop(entry["addr"], None)
    return frozenset(alive.values())


def _on_cuda(tensor: Tensor) -> bool:
    """Return whether a tensor has CUDA memory; DTensor derives global shapes on fake tensors, which have none."""
    return tensor.is_cuda and not isinstance(tensor, FakeTensor)
