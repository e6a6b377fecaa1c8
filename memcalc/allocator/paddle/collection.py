"""Paddle's garbage collector and in-place reuse, as transformations of an event stream.

Both apply to static graphs, where the last use of every variable is known in advance. Storages that the stream frees
become garbage, and the collector decides when to free them to the allocator, at the latest at the end of the step.

Source: paddle/fluid/framework/garbage_collector.cc: GarbageCollector::Add;
ir/memory_optimize_pass/eager_deletion_pass.cc: ShrinkGCVars; the operators with DECLARE_INPLACE_OP_INFERER.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memcalc.allocator.paddle.settings import PaddleSettings
from memcalc.events.event import Event, EventType
from memcalc.units import whole_number

# Operators that may write their output to the buffer of an input that is freed with them, named as in event streams:
# element-wise ones, and reshape, Paddle's own example of the strategy (BuildStrategy.enable_inplace).
INPLACE_OPERATORS = frozenset(
    "abs add ceil clamp cos div exp floor maximum minimum mul native_dropout neg pow reciprocal relu reshape"
    " reshape2 round rsqrt sigmoid sin softmax _softmax sqrt sub sum_to_size tanh threshold_backward"
    " sigmoid_backward tanh_backward _softmax_backward_data".split()
)


def transformed(events: Sequence[Event], settings: PaddleSettings) -> Sequence[Event]:
    """Return the events that reach the allocator under these flags; unchanged for a dynamic graph."""
    if not settings.static_graph:
        return events
    if settings.inplace:
        events = reused(events)
    return collected(events, settings.collection_threshold, settings.collected_fraction, fast=settings.fast_collection)


def reused(events: Sequence[Event]) -> list[Event]:
    """Return the stream with outputs written to the buffers of inputs that are freed with their operator.

    An element-wise operator's output and an input share one buffer under three conditions: the input is freed before
    the next allocation, both have the same size and stream, and no other stream uses the input.
    """
    names: dict[int, int] = {}  # storage of the stream -> buffer that it occupies
    shared: set[int] = set()  # storages that another stream uses
    merged: set[int] = set()  # positions of dropped events: frees of inputs with a reused buffer
    living: dict[int, Event] = {}
    found = []
    for index, event in enumerate(events):
        if event.kind is EventType.ALLOC:
            partner = _dying_input(events, index, living, shared)
            living[event.storage] = event
            if partner is not None:
                merged.add(partner)
                names[event.storage] = names[events[partner].storage]
                continue
            names[event.storage] = index
        elif event.kind is EventType.FREE:
            living.pop(event.storage, None)
            shared.discard(event.storage)
            if index in merged:
                continue
        elif event.kind is EventType.RECORD_STREAM:
            shared.add(event.storage)
        found.append(event._replace(storage=names.get(event.storage, event.storage)))
    return found


def _dying_input(events: Sequence[Event], index: int, living: dict[int, Event], shared: set[int]) -> int | None:
    """Return the position of the event that frees the input that gives its buffer to the output at `index`, or None."""
    output = events[index]
    if output.operator.split(".")[-2 if output.operator.count(".") > 1 else -1] not in INPLACE_OPERATORS:
        return None
    for at in range(index + 1, len(events)):
        event = events[at]
        if event.kind is not EventType.FREE:
            return None
        source = living.get(event.storage)
        if (
            source is not None
            and (source.bytes, source.stream) == (output.bytes, output.stream)
            and event.storage not in shared
            and event.storage != output.storage
        ):
            return at
    return None


def collected(events: Sequence[Event], threshold: int = 0, fraction: float = 1.0, *, fast: bool = True) -> list[Event]:
    """Return the stream with frees delayed until the garbage collector runs.

    Args:
        events: in order; a step ends at the first phase of the next step, or at the end of the stream.
        threshold: bytes of garbage collected before they are freed; negative: until the end of the step.
        fraction: fraction of a step's garbage, in bytes and largest first, that the collector handles; the rest stays
            live until the end of the step.
        fast: False if garbage is reusable only after the operator being launched has its memory, because the collector
            waits for the kernels that use it.
    """
    return list(_StreamGarbage(threshold, fast=fast).run(events, _exempt(events, fraction)))


def _exempt(events: Sequence[Event], fraction: float) -> set[int]:
    """Return the positions of FREE events of storages that stay live until the end of their step."""
    if fraction >= 1:
        return set()
    exempt: set[int] = set()
    sizes: dict[int, int] = {}
    garbage: list[tuple[int, int]] = []  # (negative bytes, position of the FREE event)

    def end_step() -> None:
        total = -sum(size for size, _ in garbage)
        wanted, seen = int(fraction * total), 0
        for size, index in sorted(garbage):
            if seen >= wanted:
                exempt.add(index)
            seen -= size
        garbage.clear()

    step = 0
    for index, event in enumerate(events):
        if event.kind is EventType.ALLOC:
            sizes[event.storage] = event.bytes
        elif event.kind is EventType.FREE:
            garbage.append((-sizes.pop(event.storage, 0), index))
        elif event.kind is EventType.PHASE and step_of(event.phase) != step:
            step = step_of(event.phase)
            end_step()
    end_step()
    return exempt


def step_of(phase: str) -> int:
    """Return the step of a phase: 2 for "forward_2", 0 for phases before the steps."""
    return whole_number(phase.rpartition("_")[2]) or 0


class _StreamGarbage:
    """Garbage of one stream: storages that the program no longer uses, and that are freed in batches."""

    def __init__(self, threshold: int, *, fast: bool) -> None:
        self._threshold = threshold
        self._fast = fast
        self._gathered: list[Event] = []  # garbage below the threshold
        self._bytes = 0
        self._kept: list[Event] = []  # garbage that stays live until the end of the step
        self._launched: list[Event] = []  # freed, but kernels that use it still run

    def run(self, events: Sequence[Event], exempt: set[int]) -> Iterator[Event]:
        """Yield the events, with each FREE delayed as by the collector, and a new number per lifetime of a storage."""
        lives: dict[int, tuple[int, int]] = {}  # storage -> number of its current lifetime, bytes
        step = 0
        for index, event in enumerate(events):
            if event.kind is EventType.ALLOC:
                lives[event.storage] = (index, event.bytes)
                yield event._replace(storage=index)
                yield from self._landed()
            elif event.kind is EventType.FREE:
                life, size = lives.pop(event.storage)
                freed = event._replace(storage=life)
                if index in exempt or self._threshold < 0:
                    self._kept.append(freed)
                else:
                    yield from self._add(freed, size)
            elif event.kind is EventType.PHASE:
                if step_of(event.phase) != step:
                    step = step_of(event.phase)
                    yield from self._end_step()
                yield event
            elif event.kind is EventType.FREE_COMPLETED:
                continue  # the collector's own delay is longer
            else:
                life, _ = lives.get(event.storage, (event.storage, 0))
                yield event._replace(storage=life)
        yield from self._end_step()

    def _add(self, freed: Event, size: int) -> Iterator[Event]:
        self._gathered.append(freed)
        self._bytes += size
        if self._bytes >= self._threshold or self._threshold <= 1:
            if self._fast:
                yield from self._gathered
            else:
                self._launched += self._gathered
            self._gathered, self._bytes = [], 0

    def _landed(self) -> Iterator[Event]:
        yield from self._launched
        self._launched = []

    def _end_step(self) -> Iterator[Event]:
        yield from self._landed()
        yield from self._gathered
        yield from self._kept
        self._gathered, self._bytes, self._kept = [], 0, []
