"""The cheapest plan whose verdict is "fits": planned by allocated memory, judged by what the allocator reserves for it.

What a plan allocates is known at once, what is reserved for it only from an allocator replay. So a first guess says how
much may be allocated, the plan for that is judged, and the guess is corrected until no cheaper plan that fits is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from memcalc.estimation.limits import limits_of
from memcalc.estimation.outside import outside_bytes
from memcalc.ledger.verdict import Verdict, holding_memory
from memcalc.planning.configured import Configured, with_recompute
from memcalc.planning.plan import Segment
from memcalc.planning.strategies.optimal import Found
from memcalc.progress import Progress, silent
from memcalc.spec.cards import Card
from memcalc.spec.spec import Spec
from memcalc.verdict.judge import card_of, judge
from memcalc.verdict.kinds import kinds_of
from memcalc.verdict.recorded import reserve_ratio

TRIES = 8  # plans that are judged; each may take a replay
QUESTIONS = 24  # plans that are asked for; most of them are known already
CLOSE = 0.002  # of the memory there is: allocated rooms that are closer than this are not told apart
MOST = 2**20  # sequences of a micro-batch
FORMULAS = 1.003  # formulas of allocated memory are off by less than this


class Proposal(NamedTuple):
    """A plan that is not judged yet.

    Args:
        configured: the chain that it was made for.
        found: the plan.
        keep: operators whose results recomputed layers keep, as `training.recompute_keep`.
    """

    configured: Configured
    found: Found
    keep: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Allocated bytes at its peak, by formulas."""
        return self.found.evaluation.peak_bytes

    @property
    def again_flops(self) -> int:
        """FLOPs that are recomputed."""
        return self.found.evaluation.again_flops

    @property
    def spec(self) -> Spec:
        """The run with the plan."""
        recompute = self.configured.recompute(self.found.plan.items)
        return with_recompute(self.configured.spec, recompute, self.keep)


class Judged(NamedTuple):
    """A plan and its verdict.

    Args:
        proposal: the plan.
        spec: the run with it.
        verdict: whether that fits.
        room: bytes that may be allocated: no cheaper plan that fits was found within them.
    """

    proposal: Proposal
    spec: Spec
    verdict: Verdict
    room: int


class Judge:
    """Judges the plans of one run by the memory that its GPU has.

    Args:
        spec: the run.
        limit: bytes of a GPU that it may hold.
        progress: told how many plans are judged.
    """

    def __init__(self, spec: Spec, limit: int, progress: Progress = silent) -> None:
        self._progress = progress
        self.card: Card | None = card_of(spec)
        self.limit = limit
        self.unmodelled_bytes = sum(each.at_least_bytes for each in holding_memory(limits_of(spec)))
        self.outside_bytes = outside_bytes(spec, self.card)
        self._ratio = reserve_ratio(kinds_of(spec))[0]
        self._known: dict[tuple[int, Segment, tuple[str, ...]], Judged] = {}

    @property
    def reservable_bytes(self) -> int:
        """What the allocator may reserve."""
        return max(self.limit - self.outside_bytes - self.unmodelled_bytes, 0)

    @property
    def first_room(self) -> int:
        """A first guess at what may be allocated, by what recorded runs of this kind reserve. It decides nothing."""
        return int(self.reservable_bytes / self._ratio)

    def judged(self, proposal: Proposal) -> Judged:
        """A plan with its verdict."""
        configured, found, keep = proposal
        key = (configured.spec.training.micro_batch_size, found.plan.items, keep)
        if key not in self._known:
            self._progress("plans", len(self._known))
            spec = proposal.spec
            self._known[key] = Judged(proposal, spec, judge(spec, self.limit), found.evaluation.peak_bytes)
        return self._known[key]

    def passes(self, verdict: Verdict) -> bool:
        """Whether a run fits, as far as it is modelled."""
        if verdict.answer == "fits":
            return True
        modelled = verdict.interval is not None and self.needed(verdict) <= self.reservable_bytes
        return verdict.answer == "unknown" and bool(verdict.unmodelled) and modelled

    def scaled(self, allocated: int, verdict: Verdict) -> int:
        """What could be allocated if as much were reserved for each byte as under this verdict."""
        return allocated * self.reservable_bytes // max(self.needed(verdict), 1)

    def needed(self, verdict: Verdict) -> int:
        """The upper end of reserved memory; where bounds decided, the lower one."""
        if verdict.interval is None:
            return verdict.least_bytes - self.unmodelled_bytes - self.outside_bytes
        return verdict.interval.high_bytes - self.outside_bytes


class Search:
    """Looks for the cheapest plan that fits.

    Args:
        ask: the cheapest plan by allocated memory within so many bytes; None: there is none.
        judge: says which plans fit.
        free: the plan that keeps everything.
        floor: allocated bytes below which there is no plan.
        others: plans to judge where they are cheaper than the best of those asked for. Reserved memory does not always
            grow with what is allocated: plans of layers that are recomputed separately leave fewer fragments.
    """

    def __init__(
        self,
        ask: Callable[[int], Proposal | None],
        judge: Judge,
        free: Proposal,
        floor: int,
        others: Sequence[Proposal],
    ) -> None:
        self._ask, self._judge, self._free = ask, judge, free
        self._others = sorted(others, key=lambda proposal: proposal.again_flops)
        self._floor = floor
        self._low, self._high = floor, max(int(judge.reservable_bytes * FORMULAS), floor + 1)
        self._tried: list[Judged] = []
        self._best: Judged | None = None

    def found(self) -> Judged | None:
        """The cheapest plan that was found to fit; else the one that is likeliest to; None: no plan fits."""
        if self._free.peak_bytes < self._high:
            if self._passes(self._free):
                return self._tried[0]
            self._high = self._free.peak_bytes
        room = min(max(self._judge.first_room, self._floor), self._high)
        for _ in range(QUESTIONS):
            proposal = self._ask(room)
            if proposal is None or len(self._tried) >= TRIES:
                break
            following = self._after(room, proposal)
            if following is None:
                break
            room = following
        for proposal in self._others:
            if not self._cheaper(proposal):
                break
            if self._passes(proposal):
                return self._tried[-1]
        return self._best or self._likeliest()

    def _after(self, room: int, proposal: Proposal) -> int | None:
        """The room to try after a plan was made for this one; None: no better plan is to be found."""
        best = self._best
        if best is not None and not self._cheaper(proposal):
            self._best, self._low = best._replace(room=room), room
        elif self._passes(proposal):
            self._best, self._low = self._tried[-1]._replace(room=room), room
            scaled = self._judge.scaled(proposal.peak_bytes, self._tried[-1].verdict)
            if best is None and self._low < scaled < self._high:
                return scaled
        elif best is None:
            self._high = room
            scaled = self._judge.scaled(proposal.peak_bytes, self._tried[-1].verdict)
            return max(min(scaled, room - 1), self._floor) if room > self._floor else None
        else:
            self._high = room
        close = self._high - self._low <= CLOSE * self._high
        return None if close else (self._low + self._high) // 2

    def _cheaper(self, proposal: Proposal) -> bool:
        """Whether a plan recomputes less than the best that is known to fit."""
        return self._best is None or proposal.again_flops < self._best.proposal.again_flops

    def _passes(self, proposal: Proposal) -> bool:
        self._tried.append(self._judge.judged(proposal))
        return self._judge.passes(self._tried[-1].verdict)

    def _likeliest(self) -> Judged | None:
        """Of the plans that may fit the one that needs least."""
        unknown = [judged for judged in self._tried if judged.verdict.answer == "unknown"]
        return min(unknown, key=lambda judged: self._judge.needed(judged.verdict), default=None)


def largest(fits: Callable[[int], bool], start: int) -> int:
    """The largest of 1, 2, ... that fits while the next one does not, looked for from `start` on; 0: not even 1."""
    low, high = 0, MOST + 1
    at, stride = max(start, 1), 1
    while high - low > 1:
        if fits(at):
            low = at
        else:
            high = at
        if high > MOST:
            at = min(low + stride, MOST)
        elif low == 0:
            at = max(high - stride, 1)
        else:
            at = (low + high) // 2
        stride *= 2
    return low
