"""Ranking of layouts that fit by cost, each with its cheapest micro-batch and recomputation.

Per layout, no recomputation, attention or all layers (and the run's own setting) are tried, and micro-batches of powers
of two. Saving more, or larger micro-batches, need more memory: a choice that needs more than one known not to fit is
not estimated. On one GPU that holds for the lower bound only: the allocator may reserve less for the larger of two
choices.

Choices of all layouts are judged in the order of their cost, with replays, until enough layouts fit. The layouts that
are left cost more. They are judged by recorded runs of their kind, without a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from memcalc.errors import InputError
from memcalc.ledger.result import Result
from memcalc.ledger.verdict import Answer, Verdict
from memcalc.progress import Progress, silent
from memcalc.search.costs import Costs, Recompute, StepCost
from memcalc.search.layouts import DEGREES, Layout, Space
from memcalc.search.variants import Reader, is_hopeless, varied
from memcalc.spec.hardware.interconnect import System
from memcalc.spec.spec import Spec
from memcalc.suggestions.run_overrides import as_is
from memcalc.verdict.judge import judge, judge_by_records, size
from memcalc.verdict.needs import can_replay

MICRO_BATCHES = (1, 2, 4, 8, 16)


class Ranked(NamedTuple):
    """A layout that fits, with its cheapest micro-batch and recomputation."""

    spec: Spec  # the layout
    costs: Costs  # seconds of one optimizer step
    device_bytes: int  # memory of a GPU


class BatchChoice(NamedTuple):
    """A micro-batch and recomputation for one layout."""

    costs: Costs
    thrift: int  # position in the order of recomputation: higher needs less memory
    micro_batch: int
    steps: int  # micro-batches of one optimizer step
    recompute: Recompute

    @property
    def order(self) -> tuple[float, int, int]:
        """The sort key by cost; of equal costs, what saves the most for backward first."""
        return self.costs.total, self.thrift, self.micro_batch


class Ranking(NamedTuple):
    """The result for all layouts."""

    fitting: tuple[Ranked, ...]  # the cheapest first
    tried: int  # valid layouts
    undecided: int  # layouts for which no choice fits for sure, but some may


class BestLayout(NamedTuple):
    """A layout that fits, with its estimate and its costs."""

    result: Result
    costs: Costs
    variant: Spec  # the layout; the estimate's run is what the file means with it


# Split of a model over the GPUs of a replica -> the most replicas with which it is known not to fit.
Failing = dict[tuple[Any, ...], int]


def some_layout_fits(
    space: Space,
    system: System,
    spec: Spec,
    fixed_fields: frozenset[str],
    failing: Failing,
    progress: Progress = silent,
    *,
    as_read: Reader = as_is,
) -> Answer:
    """Return whether any layout fits; unknown if none does for sure but some may. Arguments as for `rank`.

    With fewer replicas, each replica holds no less of the sharded states, and as many sequences or more. So splits in
    `failing` are not estimated, and splits that certainly do not fit are added to it. One GPU is always estimated: it
    is replayed, so its verdict is more precise than that of several GPUs.
    """
    recomputes = recompute_choices(spec, fixed_fields)
    undecided = False

    def fails(degrees: dict[str, Any]) -> bool:
        replicas: int = degrees["data_parallel"]
        return space.gpus > 1 and replicas <= failing.get(_split(degrees), 0)

    for number, layout in enumerate(space.layouts(fails)):
        progress(_over(space.gpus), number)
        choices = LayoutChoices(layout, system, recomputes, micro_batches(spec, layout, fixed_fields))
        if choices.cheapest(judge, as_read) is not None:
            return "fits"
        undecided = undecided or choices.undecided
        if choices.has_choices:  # otherwise no micro-batch divides the sequences, but one may with other replicas
            degrees = layout.spec.parallelism
            split = _split({field: getattr(degrees, field) for field in DEGREES})
            failing[split] = max(degrees.data_parallel, failing.get(split, 0))
    return "unknown" if undecided else "does-not-fit"


def _over(gpus: int) -> str:
    return f"layouts over {gpus:,} GPUs" if gpus > 1 else "layouts on one GPU"


def _split(degrees: dict[str, Any]) -> tuple[Any, ...]:
    """Return a layout without its replicas."""
    return tuple(degrees[field] for field in DEGREES if field != "data_parallel")


def rank(
    space: Space,
    system: System,
    spec: Spec,
    fixed_fields: frozenset[str] = frozenset(),
    top: int | None = None,
    progress: Progress = silent,
    *,
    as_read: Reader = as_is,
) -> Ranking:
    """Return the layouts that fit.

    Args:
        space: the layouts.
        system: the node and network.
        spec: the run, for its recomputation and micro-batch.
        fixed_fields: fields that keep the run's own value.
        top: how many splits of the model to find with replays, the cheapest first; None: all. Layouts that cost more
            fit if recorded runs of their kind say so.
        progress: called with the number of layouts done.
        as_read: returns a variant as the run's file is read. Layouts that are judged by recorded runs are not read.
    """
    recomputes = recompute_choices(spec, fixed_fields)
    layouts = [
        LayoutChoices(layout, system, recomputes, micro_batches(spec, layout, fixed_fields))
        for layout in space.layouts()
    ]
    waiting = [(choices.next.order, number) for number, choices in enumerate(layouts) if choices.next is not None]
    heapify(waiting)
    found: list[Ranked] = []
    splits: set[tuple[int, ...]] = set()

    def is_shown(seconds: float) -> bool:
        return top is None or len(splits) < top or (bool(found) and seconds <= found[-1].costs.total)

    while waiting and is_shown(waiting[0][0][0]):
        _, number = heappop(waiting)
        progress(_over(space.gpus), len(layouts) - len(waiting) - 1)
        ranked = layouts[number].try_next(judge, as_read)
        following = layouts[number].next
        if ranked is not None:
            found.append(ranked)
            splits.add(_shown_split(ranked.spec))
        elif following is not None:
            heappush(waiting, (following.order, number))
    for done, (_, number) in enumerate(waiting):
        progress(_over(space.gpus), len(layouts) - len(waiting) + done)
        ranked = layouts[number].cheapest(judge_by_records)
        if ranked is not None:
            found.append(ranked)
    found.sort(key=lambda ranked: (ranked.costs.total, ranked.device_bytes))
    undecided = sum(choices.undecided for choices in layouts)
    return Ranking(tuple(found), len(layouts), undecided)


def recompute_choices(spec: Spec, fixed_fields: frozenset[str]) -> list[Recompute]:
    """Return recompute options by decreasing memory. Selective recomputation of a fused kernel saves nothing."""
    own: Recompute = spec.training.recompute
    if "recompute" in fixed_fields:
        return [own]
    choices: list[Recompute] = ["none", "full"]
    if own not in choices:
        choices.insert(1, own)
    elif spec.training.attention == "eager":
        choices.insert(1, "selective")
    return choices


def micro_batches(spec: Spec, layout: Layout, fixed_fields: frozenset[str]) -> list[int]:
    """Return the sizes that divide a replica's sequences: powers of two, and the run's own.

    Interleaved schedules process micro-batches in groups of the number of stages (Megatron-LM core_r0.14,
    megatron/core/pipeline_parallel/schedules.py).
    """
    own, parallelism = spec.training.micro_batch_size, layout.spec.parallelism
    round_size = parallelism.pipeline_parallel if parallelism.schedule == "interleaved" else 1
    sizes = {own} if "micro_batch_size" in fixed_fields else {*MICRO_BATCHES, own}
    return sorted(size for size in sizes if layout.sequences % (size * round_size) == 0)


class LayoutChoices:
    """The choices of one layout, to be judged in the order of their cost until one fits.

    Args:
        layout: the layout.
        system: the node and network.
        recomputes: the recomputation to try, by decreasing memory.
        sizes: the micro-batches to try.
    """

    def __init__(self, layout: Layout, system: System, recomputes: list[Recompute], sizes: list[int]) -> None:
        self.layout = layout
        step = StepCost(layout.spec, system, layout.sequences * layout.spec.parallelism.data_parallel)
        choices = [
            BatchChoice(step.costs(recompute, size), thrift, size, layout.sequences // size, recompute)
            for thrift, recompute in enumerate(recomputes)
            for size in sizes
        ]
        self._left = sorted(choices, key=lambda choice: choice.order, reverse=True)  # the cheapest last
        self._unread = True  # whether the lower bounds of the thriftiest choices are not known yet
        self._too_much: list[BatchChoice] = []
        self._runs: dict[BatchChoice, Spec] = {}
        self._fits = self._may_fit = False
        self.has_choices = bool(choices)

    @property
    def next(self) -> BatchChoice | None:
        """The cheapest choice that was not tried yet."""
        return self._left[-1] if self._left else None

    @property
    def undecided(self) -> bool:
        """Whether no choice fits for sure, but some may."""
        return self._may_fit and not self._fits

    def cheapest(self, judged: Callable[[Spec], Verdict], as_read: Reader = as_is) -> Ranked | None:
        """Return the layout with its cheapest choice that fits, of those that were not tried yet; None if none does."""
        while self._left:
            ranked = self.try_next(judged, as_read)
            if ranked is not None:
                return ranked
        return None

    def try_next(self, judged: Callable[[Spec], Verdict], as_read: Reader = as_is) -> Ranked | None:
        """Judge the cheapest choice that is left; return it if it fits for sure."""
        if self._unread:
            self._unread = False
            # Only a choice that does not fit excludes others, which the first stage of a pipeline nearly always shows.
            thriftiest = _thriftiest(self._left)
            self._too_much += [choice for choice in thriftiest if is_hopeless(self._run(choice), first_stage=True)]
        choice = self._left.pop()
        if any(_needs_more(choice, other) for other in self._too_much):
            return None
        run = self._run(choice)
        try:
            found = judged(as_read(run))
        except InputError:  # the run's program has no such layout
            return None
        if found.answer == "fits":
            self._fits = True
            return Ranked(run, choice.costs, found.needed_bytes)
        self._may_fit = self._may_fit or found.answer == "unknown"
        if found.interval is None or not can_replay(run):  # a replay may reserve less for the larger of two choices
            self._too_much.append(choice)
        return None

    def _run(self, choice: BatchChoice) -> Spec:
        """Return the run of a choice, always the same one, of which sums are remembered for a while."""
        if choice not in self._runs:
            self._runs[choice] = chosen(self.layout, choice.recompute, choice.micro_batch)
        return self._runs[choice]


def _thriftiest(choices: list[BatchChoice]) -> Iterator[BatchChoice]:
    """Yield the choices that need the least memory, with and without accumulation, to try first.

    If they do not fit, most other choices can be skipped.
    """
    for accumulates in (True, False):
        alike = [choice for choice in choices if (choice.steps > 1) == accumulates]
        if alike:
            yield max(alike, key=lambda choice: (choice.thrift, -choice.micro_batch))


def _needs_more(choice: BatchChoice, known: BatchChoice) -> bool:
    """Return whether a choice needs at least as much as another: it saves more, or its micro-batch is larger.

    A pipeline with few micro-batches has fewer in flight, but never fewer sequences. A single micro-batch does not
    accumulate, which may need less than several smaller ones.
    """
    accumulates = choice.steps > 1 or known.steps == 1
    return accumulates and choice.thrift <= known.thrift and choice.micro_batch >= known.micro_batch


def chosen(layout: Layout, recompute: Recompute, micro_batch: int) -> Spec:
    """Return the layout with a micro-batch and recomputation; accumulation follows."""
    steps = layout.sequences // micro_batch
    return varied(
        layout.spec,
        training={
            "recompute": recompute,
            "micro_batch_size": micro_batch,
            "gradient_accumulation_steps": steps,
        },
    )


def best_of(ranking: Ranking, top: int, as_read: Reader = as_is) -> list[BestLayout]:
    """Return the cheapest layout of each split with its complete estimate, which decides whether it fits."""
    found: dict[tuple[int, ...], BestLayout] = {}
    for ranked in ranking.fitting:
        if len(found) == top:
            break
        split = _shown_split(ranked.spec)
        if split not in found:
            try:
                result = size(as_read(ranked.spec))
            except InputError:
                continue
            if result.fits:
                found[split] = BestLayout(result, ranked.costs, ranked.spec)
    return list(found.values())


def _shown_split(spec: Spec) -> tuple[int, ...]:
    """Return how a layout splits the model, of which only the cheapest layout is shown."""
    spread = spec.parallelism
    return (
        spread.tensor_parallel,
        spread.context_parallel,
        spread.expert_parallel,
        spread.pipeline_parallel,
        spread.zero_stage,
    )
