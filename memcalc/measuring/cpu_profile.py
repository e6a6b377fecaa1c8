"""CPU allocations as PyTorch's profiler records them: the lifetime of every block, and operators' internal blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.profiler import profile

MARK = "memcalc phase "
MODE = "PythonDispatchMode"  # profiler event of a dispatch mode, the recorder's; the operator is its child
ALLOCATION = torch._C._profiler._EventType.Allocation  # noqa: SLF001 -- as torch.profiler._memory_profiler does

# A Python number that an operator takes as a tensor: allocated before the operator is called, freed when it returns.
NUMBER_BYTES = 8
NUMBER = "a number as a tensor"
GENERATOR = "state of the random generator"  # kept by checkpointing, so that the recomputation repeats the same dropout


class BlockLifetime(NamedTuple):
    """Lifetime of a block of memory."""

    begin: int  # time of the allocation in nanoseconds
    end: int | None  # time of the free in nanoseconds; None: after the run
    bytes: int  # requested bytes; the profiler does not round
    inside: str | None  # the operator that uses the block internally; None: a visible tensor


class PhaseExecution(NamedTuple):
    """One execution of a phase. Nanoseconds."""

    begin: int
    end: int
    phase: str


class ProfiledCall(NamedTuple):
    """A call of an operator. Nanoseconds."""

    name: str
    end: int


class CpuProfile:
    """Block lifetimes and phases from a profiler's tree of calls.

    A block is internal to an operator if it is allocated and freed before the operator returns: casts to a common
    dtype,
    workspaces of kernels. A dispatch mode sees operators' results only, so it misses these blocks, and also those that
    never pass through the dispatcher.
    """

    def __init__(self, profiler: profile) -> None:
        self.spans: list[PhaseExecution] = []
        self._changes: list[tuple[int, int, int, ProfiledCall | None]] = []  # time, address, bytes, operator
        self._generator_bytes = torch.get_rng_state().nbytes
        results: Any = profiler.profiler.kineto_results if profiler.profiler is not None else None
        waiting: list[tuple[Any, ProfiledCall | None, bool]] = [
            (e, None, False) for e in results.experimental_event_tree()
        ]
        while waiting:
            event, operator, below_mode = waiting.pop()
            if event.tag == ALLOCATION:
                fields = event.extra_fields
                self._changes.append((event.start_time_ns, fields.ptr, fields.alloc_size, operator))
                continue
            if event.name.startswith(MARK):
                self.spans.append(PhaseExecution(event.start_time_ns, event.end_time_ns, event.name.removeprefix(MARK)))
            is_mode = event.name == MODE
            if is_mode:
                operator = None
            elif below_mode:
                operator = ProfiledCall(event.name.replace("::", "."), event.end_time_ns)
            waiting.extend((child, operator, is_mode) for child in event.children)
        self.spans.sort()

    @cached_property
    def lives(self) -> list[BlockLifetime]:
        """Every block that was allocated during the profile, in order."""
        found: list[BlockLifetime] = []
        alive: dict[int, tuple[int, ProfiledCall | None]] = {}  # by address: index in `found`, and the operator
        for time, address, size, operator in sorted(self._changes, key=lambda change: change[0]):
            if size > 0:
                alive[address] = (len(found), operator)
                found.append(BlockLifetime(time, None, size, self._outside(size) if operator is None else None))
            elif address in alive:
                at, owner = alive.pop(address)
                kept = owner.name if owner is not None and time <= owner.end else found[at].inside
                found[at] = found[at]._replace(end=time, inside=kept)
        return found

    def _outside(self, size: int) -> str | None:
        """Return the label of a block that no operator allocates; None for a tensor (`torch.tensor`)."""
        return {NUMBER_BYTES: NUMBER, self._generator_bytes: GENERATOR}.get(size)


class PhaseLevel(NamedTuple):
    """Allocated bytes of one phase, relative to the start of the first."""

    phase: str  # name of the phase
    peak: int  # peak of allocated bytes
    end: int  # allocated bytes at its end
    inside: dict[str, int]  # bytes of the peak that are internal to operators, by operator


def levels(lives: Sequence[BlockLifetime], spans: Sequence[PhaseExecution]) -> list[PhaseLevel]:
    """Return the allocated bytes by phase."""
    course = _RunningTotal(lives)
    found: list[PhaseLevel] = []
    base: int | None = None
    for span in spans:
        course.until(span.begin - 1)
        base = course.total if base is None else base
        peak, inside = course.until(span.end)
        found.append(PhaseLevel(span.phase, peak - base, course.total - base, inside))
    return found


class _RunningTotal:
    """Running total of allocated bytes over time."""

    def __init__(self, lives: Sequence[BlockLifetime]) -> None:
        begun = [(life.begin, life.bytes, life.inside) for life in lives]
        ended = [(life.end, -life.bytes, life.inside) for life in lives if life.end is not None]
        self._changes = sorted(begun + ended, key=lambda change: change[0])
        self._at = 0
        self._inside: dict[str, int] = {}
        self.total = 0

    def until(self, time: int) -> tuple[int, dict[str, int]]:
        """Advance to a time; return the peak since the previous time, and its internal bytes by operator."""
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
