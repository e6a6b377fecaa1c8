"""The requests of the allocator replay compared with those of the trace on fake tensors, in the same order.

    python -m tools.request_order qwen3-0.6b implementation=huggingface recipe=pure l=3 s=128 b=2 V=2048
    python -m tools.request_order llama-3.2-1b l=3 s=128 V=2048 --all
    python -m tools.request_order phi-2 l=2 inference.batch_size=4 inference.prompt_length=64 inference.new_tokens=1

Says "equal", or shows the first request that differs with the requests before it; `--all` lists every difference.
A request is an allocation with its size and the storages that were freed since the one before. The order of frees
between two allocations does not matter to the allocator, which merges free blocks, so it is not compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import NamedTuple

import memcalc
from memcalc.events.event import Event, EventType
from memcalc.generation.forward_peak import GenerationBlock
from memcalc.ledger.component import Component
from memcalc.programs.program import StorageEvent as Change
from memcalc.simulation.block_steps import BlockStep, BlockSteps, StreamName
from memcalc.simulation.engine_hooks import BlockFrame
from memcalc.simulation.forward_backward import ForwardBackward
from memcalc.simulation.generation import GenerationRequests
from memcalc.simulation.simulated_run import SimulatedRun
from memcalc.simulation.stage_blocks import SizedBlock, module_of
from memcalc.spec.spec import Spec
from memcalc.stream.requests import Label, Requests
from memcalc.workspaces import Script

BLOCK = 512  # bytes of the smallest block: requests up to it are scalars and tiny tables
CONTEXT = 6  # requests shown before the first difference


class Request(NamedTuple):
    """One allocation.

    `freed`: the indices of the allocations that were freed since the one before.
    """

    phase: str
    size: int
    freed: frozenset[int]
    what: str


@dataclass(frozen=True)
class Difference:
    """The first request that differs.

    Args:
        index: of the request in the whole run.
        phase: in which it is, such as "backward_1".
        place: its index in the phase.
        traced: the traced requests up to and including it, the last ones; without it if there is none.
        replayed: the replayed ones.
        reason: what differs.
    """

    index: int
    phase: str
    place: int
    traced: tuple[Request, ...]
    replayed: tuple[Request, ...]
    reason: str

    def __str__(self) -> str:
        """The place, what differs, and the requests before it on both sides."""
        lines = [f"{self.phase}, request {self.place} (request {self.index} of the run): {self.reason}"]
        for name, side in (("traced", self.traced), ("replayed", self.replayed)):
            lines.append(f"  {name}:")
            lines += [f"    {request.size:>14,}  {request.what}" for request in side]
        return "\n".join(lines)


class _Log:
    """Recorder of requests in order."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._freed: list[int] = []

    def allocate(self, phase: str, size: int, what: str) -> int:
        """Return the index of a new request."""
        self.requests.append(Request(phase, size, frozenset(self._freed), what))
        self._freed = []
        return len(self.requests) - 1

    def free(self, index: int) -> None:
        self._freed.append(index)


def traced_requests(events: Iterable[Event], above: int = BLOCK) -> list[Request]:
    """The requests of a recorded run that are larger than `above`, which is in bytes."""
    log, phase, alive = _Log(), "", dict[int, int]()
    for event in events:
        if event.kind is EventType.PHASE:
            phase = event.phase
        elif event.kind is EventType.ALLOC and event.bytes > above:
            what = " ".join(filter(None, (event.module, event.operator, str(list(event.shape)), event.line)))
            alive[event.storage] = log.allocate(phase, event.bytes, what)
        elif event.kind is EventType.FREE and event.storage in alive:
            log.free(alive.pop(event.storage))
    return log.requests


class _LoggedRequests(Requests):
    """Requests that are written down in place of being replayed."""

    def __init__(self, above: int) -> None:
        self.log = _Log()
        self.above = above
        self.what = ""
        self._phase_now = ""
        self._step = 0
        self._made: list[tuple[int, ...]] = []
        self._left: list[int] = []
        super().__init__()

    def begin(self, phase: str) -> None:
        kind, _, number = phase.rpartition("_")
        self._step += kind == "zero_grad"
        self._phase_now = f"{kind}_{self._step}" if number.isdigit() else phase  # the steady step comes twice

    def empty_cache(self) -> None:
        """Record nothing: it makes no request."""

    def take(self, size: int, stream: int = 0, label: Label = Component.TEMPORARIES) -> int:  # noqa: ARG002 -- the trace has one
        return self.play((size,), label)

    def play(self, script: Script, label: Label = Component.TEMPORARIES, stream: int = 0) -> int:  # noqa: ARG002
        taken: list[tuple[int, int]] = []
        for change in script:
            if change > self.above:
                taken.append((change, self.log.allocate(self._phase_now, change, self.what)))
            elif change < -self.above:
                last = max(index for index, (size, _) in enumerate(taken) if size == -change)
                self.log.free(taken.pop(last)[1])
        self.labels.append(label)
        self._made.append(tuple(index for _, index in taken))
        self._left.append(1)
        return len(self._left) - 1

    def relabel(self, number: int, label: Label) -> None:
        pass

    def hold(self, number: int, owners: int = 1) -> None:
        self._left[number] += owners

    def drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._left[number] -= 1
            if not self._left[number]:
                for index in self._made[number]:
                    self.log.free(index)


class _PlainSteps(BlockSteps):
    """Steps that `ForwardBackward._play` runs, all of them."""

    def of(self, number: int, stream: StreamName) -> list[BlockStep]:
        return [step._replace(size=0, frees=False) for step in super().of(number, stream)]


class _NamedPassing(ForwardBackward):
    """Names each request by the block, the operator and the storage."""

    steps_type = _PlainSteps

    def _play(self, block: SizedBlock, frame: BlockFrame, event: Change) -> None:
        requests = self.requests
        assert isinstance(requests, _LoggedRequests)
        if event.sign > 0:
            module = module_of(self.parts.spec, self.parts.stage, block)
            requests.what = f"{module}: {event.operator.label}: {block.program.storages[event.storage].name}"
        super()._play(block, frame, event)
        requests.what = ""


class _NamedReplay(SimulatedRun):
    passing_type = _NamedPassing


class _NamedGeneration(GenerationRequests):
    """Names each request by the block, the operator and the storage."""

    def _take(self, block: GenerationBlock, event: Change) -> int:
        assert isinstance(self.requests, _LoggedRequests)
        self.requests.what = f"{block.name}: {event.operator.label}: {block.program.storages[event.storage].name}"
        found = super()._take(block, event)
        self.requests.what = ""
        return found


def replayed_requests(spec: Spec, above: int = BLOCK) -> list[Request]:
    """The requests of the allocator replay of a run that are larger than `above`, which is in bytes."""
    requests = _LoggedRequests(above)
    if spec.inference is not None:
        _NamedGeneration(spec, requests).record()
    else:
        _NamedReplay(spec, requests).play()
    return requests.log.requests


def first_difference(traced: Sequence[Request], replayed: Sequence[Request]) -> Difference | None:
    """The first request that differs in phase, size, or what was freed before it; None: all are equal."""
    for index, (real, ours) in enumerate(zip_longest(traced, replayed)):
        if real is not None and ours is not None and real[:3] == ours[:3]:
            continue
        side = replayed if real is None else traced
        phase = side[index].phase
        place = index - next(at for at, each in enumerate(side) if each.phase == phase)
        before, after = max(0, index - CONTEXT), index + 1
        return Difference(
            index,
            phase,
            place,
            tuple(traced[before:after]),
            tuple(replayed[before:after]),
            _reason(real, ours, traced, replayed),
        )
    return None


def _reason(real: Request | None, ours: Request | None, traced: Sequence[Request], replayed: Sequence[Request]) -> str:
    if real is None or ours is None:
        return "the replay has more requests" if real is None else "the replay ends here"
    if real.phase != ours.phase:
        return f"{real.phase} traced, {ours.phase} replayed"
    if real.size != ours.size:
        return f"{real.size:,} bytes traced, {ours.size:,} replayed"
    early = [f"{replayed[at].size:,} ({replayed[at].what})" for at in sorted(ours.freed - real.freed)]
    late = [f"{traced[at].size:,} ({traced[at].what})" for at in sorted(real.freed - ours.freed)]
    parts = [f"only the replay has freed {each}" for each in early] + [
        f"only the trace has freed {each}" for each in late
    ]
    return "before it " + "; ".join(parts)


def all_differences(traced: Sequence[Request], replayed: Sequence[Request]) -> list[str]:
    """Every difference, after lining up the sizes of each phase."""
    pairs: dict[int, int] = {}
    found: list[str] = []
    phases = list(dict.fromkeys(each.phase for each in (*traced, *replayed)))
    for phase in phases:
        left = [at for at, each in enumerate(traced) if each.phase == phase]
        right = [at for at, each in enumerate(replayed) if each.phase == phase]
        matcher = SequenceMatcher(None, [traced[at].size for at in left], [replayed[at].size for at in right], False)
        for tag, a, b, c, d in matcher.get_opcodes():
            if tag == "equal":
                pairs.update(zip(left[a:b], right[c:d], strict=True))
                continue
            found += [f"{phase} {at}: only traced   {traced[at].size:>12,} {traced[at].what}" for at in left[a:b]]
            found += [f"{phase} {at}: only replayed {replayed[at].size:>12,} {replayed[at].what}" for at in right[c:d]]
    return found + _times(traced, replayed, pairs)


def _times(traced: Sequence[Request], replayed: Sequence[Request], pairs: dict[int, int]) -> list[str]:
    """Storages of both that are freed at different times, by the next allocation that both have."""
    back = {ours: real for real, ours in pairs.items()}
    ends, our_ends = _ends(traced, set(pairs)), _ends(replayed, set(back))
    found = []
    for real, ours in pairs.items():
        end, our_end = ends.get(real), back.get(our_ends.get(ours, -1))
        if end != our_end:
            until, other = (
                "at the end" if at is None else f"before {traced[at].phase} {at} {traced[at].what}"
                for at in (end, our_end)
            )
            one, two = traced[real], replayed[ours]
            names = f"{one.what} | {two.what}"
            found.append(f"{one.phase} {real}: {one.size:,} {names}: freed {until} traced, {other} replayed")
    return found


def _ends(requests: Sequence[Request], known: set[int]) -> dict[int, int]:
    """For each request the next known one after it is freed."""
    following, ends = -1, dict[int, int]()
    for index in range(len(requests) - 1, -1, -1):
        following = index if index in known else following
        ends |= dict.fromkeys(requests[index].freed, following)
    return {freed: end for freed, end in ends.items() if end >= 0}


def compare(spec: Spec) -> Difference | None:
    """The first request of the run that differs; None: all are equal."""
    return first_difference(traced_requests(memcalc.trace(spec, steps=3).events), replayed_requests(spec))


def main() -> int:
    """Compare one configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--gpu", default="a100-80gb")
    parser.add_argument("--all", action="store_true", help="list every difference")
    arguments = parser.parse_args()
    spec = memcalc.load(arguments.config, *arguments.overrides, gpu=arguments.gpu)
    traced, replayed = traced_requests(memcalc.trace(spec, steps=3).events), replayed_requests(spec)
    difference = first_difference(traced, replayed)
    print(difference or f"equal: {len(traced):,} requests")
    if arguments.all:
        print("\n".join(all_differences(traced, replayed)))
    return int(difference is not None)


if __name__ == "__main__":
    sys.exit(main())
