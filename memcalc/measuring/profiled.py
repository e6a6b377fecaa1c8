"""What PyTorch's profiler saw of the CPU's allocator: every block's life, and whether an operator kept it to itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.profiler import profile

MARK = "memcalc phase "
MODE = "PythonDispatchMode"  # how the profiler shows that a dispatch mode, ours, was asked; below it the operator runs
ALLOCATION = torch._C._profiler._EventType.Allocation  # noqa: SLF001 -- as torch.profiler._memory_profiler does

# A number of Python's that an operator takes as a tensor: made before the operator is called, gone when it returns.
NUMBER_BYTES = 8
NUMBER = "a number as a tensor"
GENERATOR = "state of the random generator"  # that checkpointing keeps, so that dropout is the same again


class Life(NamedTuple):
    """A block of memory.

    Args:
        begin: when it was allocated. Nanoseconds.
        end: when it was freed; None: after the run.
        bytes: as asked for; the profiler rounds nothing.
        inside: what kept it to itself; None: a tensor that everybody can see.
    """

    begin: int
    end: int | None
    bytes: int
    inside: str | None


class Span(NamedTuple):
    """A phase, each time that it ran. Nanoseconds."""

    begin: int
    end: int
    phase: str


class Operator(NamedTuple):
    """A call of an operator. Nanoseconds."""

    name: str
    end: int


class Profiled:
    """The tree of calls that a profiler recorded, gone through once.

    An operator keeps a block to itself if it is allocated and freed before the operator returns: casts to a common
    dtype, scratch of kernels. A dispatch mode, which sees operators' results, cannot see these; nor what never passes
    through the dispatcher.
    """

    def __init__(self, profiler: profile) -> None:
        self.spans: list[Span] = []
        self._changes: list[tuple[int, int, int, Operator | None]] = []  # time, address, bytes, whose
        self._generator_bytes = torch.get_rng_state().nbytes
        results: Any = profiler.profiler.kineto_results if profiler.profiler is not None else None
        waiting: list[tuple[Any, Operator | None, bool]] = [(e, None, False) for e in results.experimental_event_tree()]
        while waiting:
            event, operator, below_mode = waiting.pop()
            if event.tag == ALLOCATION:
                fields = event.extra_fields
                self._changes.append((event.start_time_ns, fields.ptr, fields.alloc_size, operator))
                continue
            if event.name.startswith(MARK):
                self.spans.append(Span(event.start_time_ns, event.end_time_ns, event.name.removeprefix(MARK)))
            is_mode = event.name == MODE
            if is_mode:
                operator = None
            elif below_mode:
                operator = Operator(event.name.replace("::", "."), event.end_time_ns)
            waiting.extend((child, operator, is_mode) for child in event.children)
        self.spans.sort()

    @cached_property
    def lives(self) -> list[Life]:
        """Every block that was allocated while it ran, in order."""
        found: list[Life] = []
        alive: dict[int, tuple[int, Operator | None]] = {}  # by address: where it is in `found`, and whose it is
        for time, address, size, operator in sorted(self._changes, key=lambda change: change[0]):
            if size > 0:
                alive[address] = (len(found), operator)
                found.append(Life(time, None, size, self._outside(size) if operator is None else None))
            elif address in alive:
                at, owner = alive.pop(address)
                kept = owner.name if owner is not None and time <= owner.end else found[at].inside
                found[at] = found[at]._replace(end=time, inside=kept)
        return found

    def _outside(self, size: int) -> str | None:
        """What is allocated by no operator, as far as it is not handed to one (`torch.tensor`)."""
        return {NUMBER_BYTES: NUMBER, self._generator_bytes: GENERATOR}.get(size)


class Level(NamedTuple):
    """What was allocated in one phase, less what was before the first. Bytes.

    Args:
        phase: its name.
        peak: the most at once.
        end: at its end.
        inside: of the peak, what was kept by whom.
    """

    phase: str
    peak: int
    end: int
    inside: dict[str, int]


def levels(lives: Sequence[Life], spans: Sequence[Span]) -> list[Level]:
    """The course of what was allocated, phase by phase."""
    course = _Course(lives)
    found: list[Level] = []
    base: int | None = None
    for span in spans:
        course.until(span.begin - 1)
        base = course.total if base is None else base
        peak, inside = course.until(span.end)
        found.append(Level(span.phase, peak - base, course.total - base, inside))
    return found


class _Course:
    """What is allocated, added up as time goes on."""

    def __init__(self, lives: Sequence[Life]) -> None:
        begun = [(life.begin, life.bytes, life.inside) for life in lives]
        ended = [(life.end, -life.bytes, life.inside) for life in lives if life.end is not None]
        self._changes = sorted(begun + ended, key=lambda change: change[0])
        self._at = 0
        self._inside: dict[str, int] = {}
        self.total = 0

    def until(self, time: int) -> tuple[int, dict[str, int]]:
        """Goes on to a time; the most that was allocated since the last one, and what of that was kept by whom."""
        peak, inside = self.total, dict(self._inside)
        while self._at < len(self._changes) and self._changes[self._at][0] <= time:
            _, size, keeper = self._changes[self._at]
            self._at += 1
            self.total += size
            if keeper is not None:
                self._inside[keeper] = self._inside.get(keeper, 0) + size
            if self.total > peak:
                peak, inside = self.total, dict(self._inside)
        return peak, {name: size for name, size in inside.items() if size}
