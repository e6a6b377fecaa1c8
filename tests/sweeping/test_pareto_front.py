"""The Pareto front of a grid, and the replays that find it."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import memcalc
from memcalc.sweeping import Table, evaluate
from memcalc.sweeping import replays as module
from memcalc.sweeping.pareto_front import GrowthAxes
from memcalc.sweeping.replays import replay
from memcalc.sweeping.verdict_terms import CLOSE, DOES_NOT_FIT, FITS, UNJUDGED
from memcalc.verdict.judge import judge, size


def table_with(axes: dict[Any, Any], verdict: list[int]) -> Table:
    table = evaluate("gpt2", axes, gpu="t4")
    judgement = replace(table.judgement, verdict=np.array(verdict, dtype=np.int8))
    return replace(table, judgement=judgement)


def members(table: Table) -> list[dict[str, object]]:
    points = [table.point(index) for index in np.flatnonzero(GrowthAxes(table).members()).tolist()]
    return [{name.rpartition(".")[2]: value for name, value in point.items()} for point in points]


def test_the_front_is_what_nothing_larger_matches() -> None:
    axes = {"b": [1, 2, 3], "s": [64, 128, 256]}
    found = members(table_with(axes, [FITS, FITS, CLOSE, FITS, FITS, DOES_NOT_FIT, FITS, DOES_NOT_FIT, DOES_NOT_FIT]))

    assert [(each["micro_batch_size"], each["sequence_length"]) for each in found] == [(1, 256), (2, 128), (3, 64)]


def test_what_is_beyond_a_failure_is_not_on_the_front() -> None:
    """Reserved memory need not grow with the batch, but a search ends at the first that does not fit."""
    found = members(table_with({"b": [1, 2, 3, 4]}, [FITS, CLOSE, DOES_NOT_FIT, CLOSE]))

    assert [each["micro_batch_size"] for each in found] == [2]


def test_only_sizes_are_compared_and_values_come_in_any_order() -> None:
    axes: dict[Any, Any] = {"recompute": ["none", "full"], "b": [4, 1, 2]}
    found = members(table_with(axes, [DOES_NOT_FIT, FITS, UNJUDGED, FITS, FITS, FITS]))

    assert [(each["recompute"], each["micro_batch_size"]) for each in found] == [("none", 1), ("full", 4)]


def test_the_front_of_random_verdicts() -> None:
    """The front equals a literal implementation of its definition."""
    axes: dict[Any, Any] = {"b": [1, 2, 3, 4], "recompute": ["none", "full"], "s": [16, 32, 48]}
    table, draw = evaluate("gpt2", axes, gpu="t4"), np.random.default_rng(0)
    points = list(product(range(4), range(2), range(3)))

    def larger(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        return one != other and one[1] == other[1] and one[0] >= other[0] and one[2] >= other[2]

    for _ in range(50):
        verdict = draw.choice([FITS, CLOSE, DOES_NOT_FIT, UNJUDGED], len(points), p=[0.6, 0.2, 0.1, 0.1])
        answers = dict(zip(points, verdict.tolist(), strict=True))
        possible = {
            point
            for point, answer in answers.items()
            if answer in (FITS, CLOSE)
            and not any(larger(point, other) and answers[other] == DOES_NOT_FIT for other in points)
        }
        expected = [point in possible and not any(larger(other, point) for other in possible) for point in points]
        assert (
            GrowthAxes(replace(table, judgement=replace(table.judgement, verdict=verdict.astype(np.int8))))
            .members()
            .tolist()
            == expected
        )


def test_a_piece_of_a_grid_has_no_front() -> None:
    table = evaluate("gpt2", {"b": [1, 2]}, gpu="t4")

    with pytest.raises(ValueError, match="whole grid"):
        GrowthAxes(replace(table, valid=table.valid[:1]))


def test_the_front_is_replayed_to_where_estimates_stop_fitting() -> None:
    fp16 = ("dtype=fp16", "attention=memory-efficient")  # a T4 has no flash attention, and this kernel in fp16 only
    table = memcalc.sweep("gpt2", {"b": range(1, 25), "s": [512, 1024]}, *fp16, gpu="t4")

    for index in np.flatnonzero(GrowthAxes(table).members()).tolist():
        result = size(table.spec(index))
        assert table.replayed[index]
        assert table.fits[index]
        assert table.reserved_bytes[index] == result.headline.reserved_bytes
        assert table.device_bytes[index] == result.headline.device_bytes
    assert [judge(memcalc.load("gpt2", f"b={b}", *fp16, gpu="t4")).answer for b in (11, 12)] == ["fits", "does-not-fit"]
    assert table.fits.reshape(24, 2)[10, 1]
    assert not table.fits.reshape(24, 2)[11, 1]


def test_the_closest_are_replayed() -> None:
    table = evaluate("gpt2", {"b": range(1, 17), "gpu": ["t4", "rtx-4090"]})
    distance = np.abs(table.device_bytes - table.usable_bytes)
    found = replay(table, 3)
    again = replay(table, 3)

    assert found.replayed[np.argsort(distance, kind="stable")[:3]].all()
    assert found.verdict.tolist() == again.verdict.tolist()
    assert not table.replayed.any(), "the table that was given stays as it is"
    assert found.peak_bytes is table.peak_bytes


def test_no_more_replays_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OF_FRONT", 2)
    told: list[tuple[str, int]] = []

    def tell(what: str, done: int, total: int | None = None) -> None:
        assert total is None
        told.append((what, done))

    found = replay(evaluate("gpt2", {"b": range(1, 25), "s": [512, 1024]}, gpu="t4"), 1, tell)

    assert found.replayed.sum() == 3
    assert told == [("replays", 1), ("replays", 2), ("replays", 3)]


def test_runs_of_unknown_requests_and_runs_without_a_gpu_are_not_replayed() -> None:
    grid = {"b": [1, 2, 4, 8, 16]}

    assert memcalc.sweep("gpt2", grid, "data_parallel=8", gpu="t4", replay=5).replayed.all()
    unknown = ("data_parallel=8", "zero_stage=2", "engine=deepspeed", "versions.deepspeed=0.19.7")
    assert not memcalc.sweep("gpt2", grid, *unknown, gpu="t4", replay=5).replayed.any()
    assert not memcalc.sweep("gpt2", grid, replay=5).replayed.any()


def test_replays_contradict_no_bound() -> None:
    """A replay does not change verdicts that were decided without one."""
    axes: dict[Any, Any] = {
        "b": range(16, 32, 4),
        "recompute": ["none", "full"],
        "implementation": ["plain", "huggingface"],
    }
    table = evaluate("gpt2", axes, "s=512", gpu="t4")
    found = replay(table, len(table))
    decided = ~table.close

    assert found.replayed.all()
    assert (found.verdict[decided] == table.verdict[decided]).all()
    assert table.close.any()
