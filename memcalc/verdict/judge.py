"""The verdict of every command: whether a run fits its GPU, or a budget; and the complete result of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import inf

from memcalc.estimation.estimate import estimate
from memcalc.estimation.limits import limits_of
from memcalc.estimation.outside_allocator import least_outside_bytes, outside_bytes
from memcalc.layout.stages import stages_of
from memcalc.ledger.result import DeviceMemory, LargestBatchAndContext, OutsideMemory, RankResult, Result, known
from memcalc.ledger.verdict import Answer, Interval, Verdict, holding_memory, overcounting
from memcalc.simulation.simulated_run import unsupported_reason
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.limits import Limit, most_unmodelled_bytes
from memcalc.spec.spec import Spec
from memcalc.verdict.needs import (
    MemoryNeed,
    allocated_bytes,
    answer_of,
    can_replay,
    gets_through,
    least_bytes,
    need_of,
    recorded_need,
)
from memcalc.verdict.other_candidates import other_candidates


def judge(spec: Spec, limit: int | None = None) -> Verdict:
    """Return whether a run fits, with as little work as possible: bounds first, then the replay.

    A run of a file with open choices fits only if the other candidates do, too; see `as_assumed`.

    Args:
        spec: the run.
        limit: bytes of the device that it may use; None: the usable memory of its GPU, which must then be given.

    Raises:
        InputError: the family, or this implementation of it, is not modelled.
    """
    gpu = spec.gpu
    if limit is None:
        assert gpu is not None
        limit = gpu.usable_bytes
    limits, least = limits_of(spec), least_bytes(spec, gpu, limit)
    known = _decided(least, limit, limits)
    return as_assumed(known or verdict_of(need_of(spec, gpu), gpu, limit, least, limits), spec)


def judge_by_records(spec: Spec) -> Verdict:
    """Return the verdict of `judge` without a replay: by bounds, and by the ratios of recorded runs of this kind.

    Unknown where only a replay can decide: above the interval a run may fit, since a full GPU frees cached blocks.
    """
    gpu = spec.gpu
    assert gpu is not None
    found = _by_records(spec, gpu.usable_bytes)
    if found.answer == "fits" and not all(fits_by_records(each, found.limit_bytes) for each in other_candidates(spec)):
        return replace(found, answer="unknown")
    return found


def _by_records(spec: Spec, limit: int) -> Verdict:
    """Return the verdict of `judge_by_records` for a limit, without other candidates."""
    gpu, limits = spec.gpu, limits_of(spec)
    least = least_bytes(spec, gpu, limit)
    known = _decided(least, limit, limits)
    if known is not None:
        return known
    found = verdict_of(recorded_need(spec, gpu, allocated_bytes(spec, gpu)), gpu, limit, least, limits)
    return replace(found, answer="unknown") if found.answer == "does-not-fit" and can_replay(spec) else found


def fits_by_records(spec: Spec, limit: int) -> bool:
    """Return whether recorded runs of its kind suffice to say that a run fits."""
    return _by_records(spec, limit).answer == "fits"


def is_expected_to_fit(spec: Spec) -> bool:
    """Return whether a run's replay finishes on its GPU, ignoring errors; without a replay, whether the run fits.

    The same must be true of other candidates of open choices. Otherwise it equals `judge(spec).expected`, with one
    replay where that may need two.
    """
    return is_expected_as_assumed(spec) and others_are_expected(spec)


def others_are_expected(spec: Spec) -> bool:
    """Return whether all other candidates of open choices are expected to fit."""
    gpu = spec.gpu
    assert gpu is not None
    return all(
        fits_by_records(each, gpu.usable_bytes) or is_expected_as_assumed(each) for each in other_candidates(spec)
    )


def is_expected_as_assumed(spec: Spec) -> bool:
    """Return `is_expected_to_fit` without other candidates."""
    gpu = spec.gpu
    assert gpu is not None
    if not can_replay(spec):
        return judge(spec).expected
    limits = limits_of(spec)
    least = least_bytes(spec, gpu, gpu.usable_bytes)
    return _decided(least, gpu.usable_bytes, limits) is None and gets_through(spec, gpu)


def fits(spec: Spec, limit: int | None = None) -> Verdict | None:
    """Return the verdict of `judge` for a run that fits; None for any other, often with less work."""
    if limit is None and can_replay(spec) and not is_expected_to_fit(spec):
        return None
    verdict = judge(spec, limit)
    return verdict if verdict.answer == "fits" else None


def _decided(least: int, limit: int, limits: Sequence[Limit]) -> Verdict | None:
    """Return the verdict if the lower bound exceeds the limit; otherwise None."""
    unmodelled = holding_memory(limits)
    beyond = least + sum(each.at_least_bytes for each in unmodelled)
    if beyond <= limit:
        return None
    return Verdict("does-not-fit", beyond, None, limit, None, False, tuple(each.feature for each in unmodelled))


def verdict_of(need: MemoryNeed, gpu: GpuSpec | None, limit: int, least: int, limits: Sequence[Limit]) -> Verdict:
    """Return the verdict of a run with a known need.

    Args:
        need: of the rank that needs most.
        gpu: the GPU; None if the limit is only a budget.
        limit: bytes it may use. A full GPU makes the allocator free cached blocks; a smaller budget does not.
        least: the lower bound of device memory.
        limits: what is not modelled.
    """
    on_gpu = gpu is not None and limit >= gpu.usable_bytes
    answer = need.on_gpu if on_gpu and need.on_gpu is not None else answer_of(need, limit)
    interval = _interval(need, answer, limit, least)
    unmodelled = holding_memory(limits)
    extra = sum(each.at_least_bytes for each in unmodelled)
    overcounted, most = overcounting(limits), most_unmodelled_bytes(limits)
    bounded = most is not None and need.high_bytes + most <= limit
    by_records = on_gpu and need.overhead is None
    if extra + (least if by_records else interval.low_bytes) > limit:
        answer = "does-not-fit"
    elif unmodelled and answer == "fits" and not bounded:
        answer = "unknown"
    perhaps = answer == "does-not-fit" and bool(overcounted) and least + extra <= limit
    expected = answer != "does-not-fit" and _is_expected(need, limit, on_gpu=on_gpu)
    return Verdict(
        "unknown" if perhaps else answer,
        least + extra,
        need.device_bytes,
        limit,
        interval,
        expected,
        tuple(each.feature for each in unmodelled),
        overcounted=tuple(each.feature for each in overcounted) if perhaps else (),
    )


def _is_expected(need: MemoryNeed, limit: int, *, on_gpu: bool) -> bool:
    """Return whether the replay finishes; without a replay, whether the upper end of the interval fits."""
    if need.overhead is None:
        return need.high_bytes <= limit
    return bool(need.replay_finishes) if on_gpu else need.device_bytes <= limit


def _interval(need: MemoryNeed, answer: Answer, limit: int, least: int) -> Interval:
    """Return the interval from `least`, narrowed by the answer: a run that fits needs no more than the limit.

    A run without a replay that may fit although it reserves more on a larger device may need less than the limit.
    """
    low, high = max(need.low_bytes, least), need.high_bytes
    if answer == "fits":
        high = min(high, limit)
    elif answer == "does-not-fit":
        low = max(low, limit + 1)
    elif need.overhead is None:
        low = max(min(low, limit), least)
    return Interval(min(low, high), max(low, high), need.errors, need.late_bytes > need.most_reserved_bytes)


def size(spec: Spec, limit: int | None = None, least: int | None = None) -> Result:
    """Return the memory of each rank at each phase, and the verdict, with an allocator replay if possible.

    Args:
        spec: the run.
        limit: bytes of the device that it may use; None: the usable memory of its GPU, if it has one.
        least: the lower bound of device memory for this limit, if already known.

    Raises:
        InputError: the family, or this implementation of it, is not modelled; or the PyTorch version does not accept
            the allocator settings.
    """
    gpu = spec.gpu
    why = unsupported_reason(spec)
    need = need_of(spec, gpu) if can_replay(spec) else None
    if need is not None and need.overhead is None:
        why, need = "the run needs more than 1 PiB, the largest device of the allocator model", None
    result = estimate(spec, None if need is None else need.overhead)
    ranks = sorted(
        (_with_memory(spec, gpu, rank, need) for rank in result.ranks),
        key=lambda rank: -(rank.device_bytes or rank.reserved_bytes or 0),
    )  # stable: of equal stages the one with the highest allocated peak comes first
    headline = need or recorded_need(spec, gpu, result.ledger.peak_bytes)
    if limit is None and gpu is not None:
        limit = gpu.usable_bytes
    judgement = None
    if limit is not None:
        least = least_bytes(spec, gpu, limit) if least is None else least
        judgement = as_assumed(verdict_of(headline, gpu, limit, least, result.limits), spec)
    sized = replace(
        result,
        ranks=tuple(ranks),
        judgement=judgement,
        confidence="formula" if need is None else "replay",
        notes=(
            *result.notes,
            *([f"Allocator not replayed: {why}."] if why else []),
        ),
    )
    return sized if spec.inference is None else _with_largest(sized)


def size_against(spec: Spec, limit: int) -> Result:
    """Return the result of `size`, but skip the replay if the lower bound alone exceeds the limit.

    Reserved and device memory of such a run are unknown, and its verdict has no interval.
    """
    least = least_bytes(spec, spec.gpu, limit)
    known = _decided(least, limit, limits_of(spec))
    known = None if known is None else as_assumed(known, spec)
    if known is None or known.answer != "does-not-fit":
        return size(spec, limit, least)
    return replace(estimate(spec), judgement=known)


def as_assumed(verdict: Verdict, spec: Spec) -> Verdict:
    """Return the verdict of a run with open values: unknown if candidates may have different answers.

    The candidate with the largest allocated peak is counted. Another one may reserve more.
    """
    verdict = _with_other_candidates(verdict, spec)
    moved = moved_bytes(spec)
    least = max(verdict.least_bytes - moved, 0)
    if verdict.overcounted:
        return replace(verdict, least_bytes=least)
    if verdict.answer != "does-not-fit" or not moved:
        return verdict
    smallest = allocated_bytes(spec, spec.gpu) - moved + least_outside_bytes(spec, spec.gpu)
    if smallest > verdict.limit_bytes:
        return verdict
    return replace(verdict, answer="unknown", least_bytes=least, assumed=True)


def moved_bytes(spec: Spec) -> int:
    """Return the bytes by which another candidate of an open choice decreases the allocated peak at most."""
    return max((each.moved_bytes for each in spec.origin.assumptions), default=0)


def _with_other_candidates(verdict: Verdict, spec: Spec) -> Verdict:
    """Return the verdict; unknown for a run that fits, but may not with another candidate of an open choice."""
    if verdict.answer != "fits":
        return verdict
    limit, most = verdict.limit_bytes, 0
    for other in other_candidates(spec):
        if not fits_by_records(other, limit):
            found = judge(other, limit)
            if found.answer != "fits":
                most = max(most, found.needed_bytes if found.interval is None else found.interval.high_bytes)
    if not most:
        return verdict
    assert verdict.interval is not None  # bounds alone never decide that a run fits
    interval = verdict.interval._replace(high_bytes=max(most, verdict.interval.high_bytes), of_candidates=True)
    return replace(verdict, answer="unknown", interval=interval)


def _with_largest(result: Result) -> Result:
    """Add the largest batch and context that fit the GPU to the estimate of a generation, found when first read."""
    if result.gpu is None or result.generation is None:
        return result

    @cache
    def search() -> LargestBatchAndContext:
        from memcalc.estimation.max_batch import largest

        return largest(result.spec, _is_possible, _left_bytes)

    return replace(result, generation=replace(result.generation, search=search))


def _is_possible(spec: Spec) -> bool:
    """Return whether the lower bound admits a run on its GPU."""
    gpu = spec.gpu
    assert gpu is not None
    return _decided(least_bytes(spec, gpu, gpu.usable_bytes), gpu.usable_bytes, limits_of(spec)) is None


def _left_bytes(spec: Spec) -> float:
    """Return the bytes that the upper end of a run's interval leaves free, negative if and only if it does not fit.

    0 if it fits because cached blocks are freed; -inf if bounds alone decided.
    """
    verdict = judge(spec)
    if verdict.interval is None or verdict.device_bytes is None:
        return -inf
    left = verdict.limit_bytes - verdict.device_bytes * (1 + verdict.interval.errors.high)
    return max(left, 0.0) if verdict.answer == "fits" else min(left, -1.0)


def _with_memory(spec: Spec, gpu: GpuSpec | None, rank: RankResult, need: MemoryNeed | None) -> RankResult:
    """Return the rank with its reserved memory, from the replay or from recorded runs."""
    found = need or recorded_need(spec, gpu, rank.ledger.peak_bytes)
    stage = stages_of(spec)[rank.rank.get("pipeline_stage", 0)]
    if need is not None and need.overhead is not None:
        own = need.overhead.of(stage.index).reserved_bytes
        found = need._replace(reserved_bytes=own, outside_bytes=outside_bytes(spec, gpu, stage))
    context = 0 if gpu is None else gpu.context_bytes
    cached = found.reserved_bytes - rank.ledger.peak_bytes
    memory = DeviceMemory(
        found.reserved_bytes,
        None if gpu is None else found.device_bytes,
        OutsideMemory(cached, context, found.outside_bytes - context),
    )
    return replace(rank, memory=known(memory))


def size_lazily(spec: Spec) -> Result:
    """Return the result of `size`, with the replay delayed until reserved or device memory or the verdict is read.

    A replayed pipeline is not delayed: its headline is the stage that reserves most.
    """
    if spec.parallelism.pipeline_parallel > 1 and can_replay(spec):
        return size(spec)
    complete = cache(lambda: size(spec))
    result = estimate(spec) if spec.inference is None else _with_largest(estimate(spec))
    ranks = tuple(replace(rank, memory=cache(lambda at=rank.rank: _memory(complete(), at))) for rank in result.ranks)
    return replace(result, ranks=ranks, completion=complete)


def _memory(result: Result, rank: dict[str, int]) -> DeviceMemory:
    return next(found.memory() for found in result.ranks if found.rank == rank)
