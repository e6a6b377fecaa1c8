"""Ranking of layouts that fit by cost, each with its cheapest micro-batch and recomputation.

Per layout, no recomputation, attention or all layers (and the run's own setting) are tried, and micro-batches of powers
of two. Saving more, or larger micro-batches, need more memory: a choice that needs more than one known not to fit is
not estimated. On one GPU that holds for the lower bound only: the allocator may reserve less for the larger of two
choices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from memcalc.ledger.result import Result
from memcalc.ledger.verdict import Answer
from memcalc.progress import Progress, silent
from memcalc.search.costs import Costs, Recompute, StepCost
from memcalc.search.layouts import DEGREES, Layout, Space
from memcalc.search.variants import is_hopeless, varied
from memcalc.spec.hardware.interconnect import System
from memcalc.spec.spec import Spec
from memcalc.verdict.judge import judge, size
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


class Ranking(NamedTuple):
    """The result for all layouts."""

    fitting: tuple[Ranked, ...]  # the cheapest first
    tried: int  # valid layouts
    sized: int  # number of estimates
    undecided: int  # layouts for which no choice fits for sure, but some may


class BestLayout(NamedTuple):
    """A layout that fits, with its estimate and its costs."""

    result: Result
    costs: Costs


# Split of a model over the GPUs of a replica -> the most replicas with which it is known not to fit.
Failing = dict[tuple[Any, ...], int]


def some_layout_fits(
    space: Space,
    system: System,
    spec: Spec,
    fixed_fields: frozenset[str],
    failing: Failing,
    progress: Progress = silent,
) -> Answer:
    """Return whether any layout fits; unknown if none does for sure but some may. Arguments as for `rank`.

    With fewer replicas, each replica holds no less of the sharded states, and as many sequences or more. So splits in
    `failing` are not estimated, and splits that certainly do not fit are added to it. One GPU is always estimated: it
    is replayed, so its verdict is more precise than that of several GPUs.
    """
    search = _Search()
    recomputes = recompute_choices(spec, fixed_fields)

    def fails(degrees: dict[str, Any]) -> bool:
        replicas: int = degrees["data_parallel"]
        return space.gpus > 1 and replicas <= failing.get(_split(degrees), 0)

    for number, layout in enumerate(space.layouts(fails)):
        progress(_over(space.gpus), number)
        sizes = micro_batches(spec, layout, fixed_fields)
        if search.cheapest(layout, system, recomputes, sizes) is not None:
            return "fits"
        if sizes:  # otherwise no micro-batch divides the sequences, but one may with other replicas
            degrees = layout.spec.parallelism
            split = _split({field: getattr(degrees, field) for field in DEGREES})
            failing[split] = max(degrees.data_parallel, failing.get(split, 0))
    return "unknown" if search.undecided else "does-not-fit"


def _over(gpus: int) -> str:
    return f"layouts over {gpus:,} GPUs" if gpus > 1 else "layouts on one GPU"


def _split(degrees: dict[str, Any]) -> tuple[Any, ...]:
    """Return a layout without its replicas."""
    return tuple(degrees[field] for field in DEGREES if field != "data_parallel")


def rank(
    space: Space, system: System, spec: Spec, fixed_fields: frozenset[str] = frozenset(), progress: Progress = silent
) -> Ranking:
    """Return every layout that fits.

    Args:
        space: the layouts.
        system: the node and network.
        spec: the run, for its recomputation and micro-batch.
        fixed_fields: fields that keep the run's own value.
        progress: called with the number of layouts done.
    """
    search = _Search()
    recomputes = recompute_choices(spec, fixed_fields)
    found: list[Ranked] = []
    tried = undecided = 0
    for layout in space.layouts():
        progress(_over(space.gpus), tried)
        tried += 1
        before = search.undecided
        ranked = search.cheapest(layout, system, recomputes, micro_batches(spec, layout, fixed_fields))
        if ranked is not None:
            found.append(ranked)
        elif search.undecided > before:
            undecided += 1
    found.sort(key=lambda ranked: (ranked.costs.total, ranked.device_bytes))
    return Ranking(tuple(found), tried, search.sized, undecided)


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


class _Search:
    """Estimates and counts choices."""

    def __init__(self) -> None:
        self.sized = 0
        self.undecided = 0

    def cheapest(self, layout: Layout, system: System, recomputes: list[Recompute], sizes: list[int]) -> Ranked | None:
        """Return the layout with its cheapest choice that fits; None if none does."""
        step = StepCost(layout.spec, system, layout.sequences * layout.spec.parallelism.data_parallel)
        choices = [
            BatchChoice(step.costs(recompute, size), thrift, size, layout.sequences // size, recompute)
            for thrift, recompute in enumerate(recomputes)
            for size in sizes
        ]
        choices.sort(key=lambda choice: (choice.costs.total, choice.thrift, choice.micro_batch))
        if not choices:
            return None
        known: dict[BatchChoice, Ranked | None] = {}
        too_much: list[BatchChoice] = []

        def tried(choice: BatchChoice) -> Ranked | None:
            if choice not in known:
                dominated = any(_needs_more(choice, other) for other in too_much)
                known[choice] = None if dominated else self._ranked(layout, choice, too_much)
            return known[choice]

        for choice in _thriftiest(choices):
            run = chosen(layout, choice.recompute, choice.micro_batch)
            if not can_replay(run):
                tried(choice)
            elif is_hopeless(run):  # excluded by its lower bound, without a replay
                known[choice] = None
                too_much.append(choice)
        return next((ranked for choice in choices if (ranked := tried(choice)) is not None), None)

    def _ranked(self, layout: Layout, choice: BatchChoice, too_much: list[BatchChoice]) -> Ranked | None:
        """Return the choice if it fits for sure; else exclude choices that need more, unless a replay decided."""
        run = chosen(layout, choice.recompute, choice.micro_batch)
        self.sized += 1
        found = judge(run)
        if found.answer == "fits":
            return Ranked(run, choice.costs, found.needed_bytes)
        self.undecided += found.answer == "unknown"
        if found.interval is None or not can_replay(run):
            too_much.append(choice)
        return None


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


def best_of(ranking: Ranking, top: int) -> list[BestLayout]:
    """Return the cheapest layout of each split with its complete estimate, which decides whether it fits."""
    found: dict[tuple[int, ...], BestLayout] = {}
    for ranked in ranking.fitting:
        if len(found) == top:
            break
        spread = ranked.spec.parallelism
        split = (
            spread.tensor_parallel,
            spread.context_parallel,
            spread.expert_parallel,
            spread.pipeline_parallel,
            spread.zero_stage,
        )
        if split not in found:
            result = size(ranked.spec)
            if result.fits:
                found[split] = BestLayout(result, ranked.costs)
    return list(found.values())
