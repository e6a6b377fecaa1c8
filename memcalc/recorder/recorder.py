"""Every allocation and free of a running step, with its operator, module, line, phase and component."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import count
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memcalc.events.event import Event, EventType
from memcalc.ledger.component import Component
from memcalc.progress import Progress, silent
from memcalc.recorder.attribution import LocationTracker, OperatorLocation, StorageComponents, newest_node, shown_file
from memcalc.recorder.in_place import IN_PLACE, in_place, references_of_last
from memcalc.recorder.kernels import Hidden, Kernels, tensors
from memcalc.recorder.storages import Number, Storages, calling_on_resize, holds_tensors, part_here

PROGRESS_EVERY = 256  # events; about every 0.1 s on fake tensors

WHERE = torch.ops.prim.device.default  # the most frequent call of PyTorch's engine on fake tensors
CAST = torch.ops.aten._to_copy.default  # noqa: SLF001 -- an operator's name

RESIZED = "resize_"  # a method of UntypedStorage, not an operator

HIDDEN_FROM = 2**40  # storage numbers of operators' internal blocks begin here, far from those of storages


@cache
def _hold_tensors(kinds: tuple[type, ...]) -> bool:
    return any(issubclass(kind, Tensor) and hasattr(kind, "__tensor_flatten__") for kind in kinds)


@cache
def is_composite(operator: Any) -> bool:
    """Return whether an operator is composed of others on every device, as `linear` is of `addmm`."""
    name, key = operator.name(), "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)  # noqa: SLF001 -- as OpOverload.decompose does


class Recorder(TorchDispatchMode):
    """Records everything that PyTorch allocates while it is entered.

    Args:
        kernels: the device's effects beyond operators' outputs.
        counts: returns whether a tensor is in the recorded memory; None: every tensor is.
        progress: called with the phase and the number of events so far.
        on_host: for a tensor that does not count, returns the type of its host memory (memcalc.events.event); None: it
            is not recorded.
    """

    def __init__(
        self,
        kernels: Kernels | None = None,
        counts: Callable[[Tensor], bool] | None = None,
        progress: Progress = silent,
        on_host: Callable[[Tensor], int | None] = lambda _: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = kernels or Kernels()
        self.places = LocationTracker(self._layer_ended)
        self._layers_output: Number | None = None
        self.purposes = StorageComponents()
        self.phase = ""
        self._counts = counts
        self._on_host = on_host
        self._hosted: set[Number] = set()
        self._progress = progress
        self._log: list[tuple[Any, ...]] = []
        self._storages = Storages(self._ended)
        self._hidden_numbers = count(HIDDEN_FROM)
        self._recomputing = False
        self._started = time.perf_counter_ns()
        self._around = ExitStack()
        self._references = references_of_last()

    # -- called by the run -------------------------------------------------------------------------------------------

    def begin_phase(self, name: str) -> None:
        """Begin a phase; all following events belong to it."""
        self.phase = name
        self._log.append((EventType.PHASE, self._now(), name))
        if name.startswith("forward"):
            self.places.start()
        self.purposes.begin_phase(name)

    def name_modules(self, model: nn.Module) -> None:
        """Register the names of the model's modules, once it is built."""
        self.places.name(model)

    def mark(self, component: Component, marked: Iterable[Tensor]) -> None:
        """Set the component of these tensors' storages, for their whole lifetime."""
        with torch._C.DisableTorchFunction():  # noqa: SLF001 -- the recorder's own calls are not part of the run
            for tensor in marked:
                number = self._storages.number(part_here(tensor))
                if number is not None:
                    self.purposes.mark(number, component)

    def empty_cache(self) -> None:
        """Record that the run empties its allocator's cache."""
        self._log.append((EventType.EMPTY_CACHE, self._now()))

    def end_phase(self) -> None:
        """End the phase; its live storages are marked as outliving it."""
        if self.phase.startswith("forward") and self._layers_output is not None:
            # The input of the final norm counts as logits and loss.
            self.purposes.mark(self._layers_output, Component.LOGITS_AND_LOSS)
            self._layers_output = None
        self.purposes.end_phase()

    # -- called by PyTorch -------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in this mode, and the guard would slow down every operator

    def __enter__(self) -> Self:
        """Start recording."""
        self._around.enter_context(self.places.following())
        self._around.enter_context(calling_on_resize(self._resized, self._resize))
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: object) -> None:
        """Stop recording. Storages that are still live stay live in the record."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._around.close()

    def __torch_dispatch__(  # noqa: D105
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operator is WHERE:
            return args[0].fake_device
        if _hold_tensors(tuple(types)):
            return NotImplemented  # a DTensor or similar: operators on its inner tensors are dispatched again
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and is_composite(operator):
            with self._further():  # autograd, which is off, would have decomposed it before dispatch
                return operator.decompose(*args, **kwargs)
        if operator in IN_PLACE:
            instead = in_place(operator, args, kwargs, self._references)
            if instead is not None:
                operator, args = instead.operator, (*args, *instead.more)
        node = newest_node()
        output = self.kernels.run(operator, args, kwargs)
        with torch._C.DisableTorchFunction():  # noqa: SLF001 -- as above
            self._look_at(operator, args, kwargs, output, node)
        return output

    @contextmanager
    def _further(self) -> Iterator[None]:
        """Continue recording inside an operator."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _look_at(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, node: int) -> None:
        place: OperatorLocation | None = None
        fresh: list[tuple[int, Number, Tensor]] = []
        for position, tensor in enumerate(self.kernels.outputs(operator, output)):
            if self._is_recorded(tensor):
                number = self._storages.see(tensor)
                if number is not None:
                    fresh.append((position, number, tensor))
        hidden = self.kernels.hidden(operator, args, kwargs, output)
        if fresh or hidden or torch.is_grad_enabled():
            # Needed even if nothing is allocated: views have backward nodes too.
            place = self.places.here(node)
        if self.places.accumulates():
            self.mark(Component.GRADIENTS, tensors(args))
        if place is None:
            return
        if self._recomputing and not place.recomputed:
            self.purposes.end_phase()  # what recomputation leaves live was saved for backward
        self._recomputing = place.recomputed
        name = self.name_of(operator)
        taken: list[tuple[int, Number]] = []  # sizes and numbers of internal blocks
        waiting = list(hidden)
        for position, number, tensor in fresh:
            while waiting and waiting[0].at <= position:
                self._follow(waiting.pop(0), taken, name, place)
            self._allocated(number, tensor, name, place)
        for each in waiting:
            self._follow(each, taken, name, place)
        if fresh and operator is CAST and self._is_weight(args[0]):
            # Autocast keeps the cast through forward, but it is not an activation: it can be derived from the weight.
            self.purposes.mark(fresh[0][1], Component.TEMPORARIES)

    def _is_recorded(self, tensor: Tensor) -> bool:
        if holds_tensors(tensor):
            return False
        return self._counts is None or self._counts(tensor) or self._on_host(tensor) is not None

    def _allocated(self, number: Number, tensor: Tensor, name: str, place: OperatorLocation) -> None:
        size = tensor.untyped_storage().nbytes()
        stream = self._on_host(tensor)
        if stream is None:
            stream = self.kernels.stream
        else:
            self._hosted.add(number)
        self._log.append(
            (
                EventType.ALLOC,
                self._now(),
                number,
                size,
                name,
                place,
                tuple(tensor.shape),
                tensor.dtype,
                self.phase,
                stream,
            )
        )
        self.purposes.born(number, self.phase, place)
        if not len(self._log) % PROGRESS_EVERY:
            self._progress(self.phase, len(self._log))

    def _follow(self, hidden: Hidden, taken: list[tuple[int, Number]], name: str, place: OperatorLocation) -> None:
        """Record the blocks that an operator allocates and frees internally."""
        for size in hidden.script:
            if size > 0:
                number = next(self._hidden_numbers)
                what = (number, size, name, place, (size,), torch.uint8, self.phase, self.kernels.stream)
                self._log.append((EventType.ALLOC, self._now(), *what))
                self.purposes.born(number, self.phase, place)
                self.purposes.mark(number, hidden.component)
                taken.append((size, number))
            else:
                newest = next(block for block in reversed(taken) if block[0] == -size)
                taken.remove(newest)
                self._ended(newest[1])

    def _is_weight(self, tensor: Tensor) -> bool:
        number = self._storages.number(tensor)
        return number is not None and self.purposes.marked(number) is Component.WEIGHTS

    def _ended(self, number: Number) -> None:
        self._log.append((EventType.FREE, self._now(), number))
        self.purposes.freed(number)

    def _layer_ended(self, output: Any) -> None:
        first = next(tensors(output), None)
        self._layers_output = None if first is None else self._storages.number(first)

    def _resize(self, resize: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return resize(*args, **kwargs)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        number = self._storages.changed(storage)
        if number is not None:
            self._resized_storage(number, storage, self.places.here(newest_node()))

    def _resized_storage(self, number: Number, storage: torch.UntypedStorage, place: OperatorLocation) -> None:
        size = storage.nbytes()
        what = (number, size, RESIZED, place, (size,), torch.uint8, self.phase, self.kernels.stream)
        self._log.append((EventType.ALLOC, self._now(), *what))
        self.purposes.born(number, self.phase, place)

    def _now(self) -> int:
        return (time.perf_counter_ns() - self._started) // 1000

    @staticmethod
    def name_of(operator: Any) -> str:
        """Return a name such as "aten.mm"; memcalc's substitutes have the names of PyTorch's operators."""
        schema: str = operator._schema.name  # noqa: SLF001 -- str(operator) is slower and includes the overload
        return schema.replace("::", ".").replace("memcalc.", "aten.")

    # -- the record --------------------------------------------------------------------------------------------------

    def events(self) -> tuple[Event, ...]:
        """Return the events so far, each allocation with its final component."""
        return tuple(self._events(hosted=False))

    def host_events(self) -> tuple[Event, ...]:
        """Return the events in host memory; () if the run puts nothing there."""
        return tuple(self._events(hosted=True)) if self._hosted else ()

    def _events(self, *, hosted: bool) -> Iterator[Event]:
        purposes = self.purposes.settled()
        for kind, now, *what in self._log:
            if kind in (EventType.ALLOC, EventType.FREE) and (what[0] in self._hosted) is not hosted:
                continue
            if kind is EventType.ALLOC:
                number, size, name, place, shape, dtype, phase, stream = what
                yield Event(
                    EventType.ALLOC,
                    number,
                    size,
                    stream,
                    component=purposes[number],
                    phase=phase,
                    module=place.module,
                    operator=name,
                    shape=shape,
                    dtype=dtype_name(dtype),
                    line=line_of(place),
                    time_us=now,
                )
            elif kind is EventType.FREE:
                yield Event(EventType.FREE, what[0], time_us=now)
            elif kind is EventType.EMPTY_CACHE:
                yield Event(EventType.EMPTY_CACHE, time_us=now)
            else:
                yield Event(EventType.PHASE, phase=what[0], time_us=now)


DTYPE_WORDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def dtype_name(dtype: torch.dtype) -> str:
    """Return memcalc's name of a dtype, such as "bf16"; else PyTorch's name."""
    return DTYPE_WORDS.get(dtype) or str(dtype).removeprefix("torch.")


def line_of(place: OperatorLocation) -> str:
    """Return the line of a place, such as "model.py:12"; "" if unknown."""
    file, number = place.line
    return f"{shown_file(file)}:{number}" if file else ""
