"""What follows from runs is found once for those that agree in what it reads, and never for others."""

import numpy as np
import pytest

from memcalc.engine.reading import Reader, changed
from memcalc.estimation.stages import stages_of
from memcalc.estimation.states import state_peak
from memcalc.spec.loading import load


def runs(*several: str):
    """GPT-2 with these overrides, each a run."""
    return [load("gpt2", each.split()) for each in several]


@pytest.fixture
def asked():
    """The runs for which a function was asked, by two of their fields."""
    return []


def shards(asked):
    """Over how many ranks something is sharded: of a run that shards nothing data parallelism is not read."""

    def function(run):
        stage = run.parallelism.zero_stage
        found = run.parallelism.shards if stage else 1
        asked.append((stage, found))
        return found

    return function


def test_a_run_that_agrees_in_what_is_read_is_not_asked_for(asked):
    several = runs("data_parallel=2", "data_parallel=8", "data_parallel=8 zero_stage=1", "zero_stage=1 recompute=full")
    reader = Reader()
    reader.meet(several)

    found = [reader.find("shards", run, shards(asked)) for run in (*several, *several)]

    assert found == [1, 1, 8, 1] * 2
    assert asked == [(0, 1), (1, 8), (1, 1)]


def test_who_asks_inside_reads_what_was_found_there(asked):
    several = runs("zero_stage=1 data_parallel=2", "zero_stage=1 data_parallel=8")
    reader = Reader()
    reader.meet(several)
    for run in several:
        reader.find("shards", run, shards(asked))

    twice = [reader.find("twice", run, lambda it: 2 * reader.find("shards", it, shards(asked))) for run in several]

    assert twice == [4, 16]
    assert len(asked) == 2


def test_a_field_that_is_found_to_differ_makes_it_forget(asked):
    reader = Reader()
    for run in runs("zero_stage=1 data_parallel=2", "zero_stage=1 data_parallel=8"):
        reader.meet([run])
        assert reader.find("shards", run, shards(asked)) == run.parallelism.data_parallel
    assert len(reader) == 1


def test_a_result_may_be_none(asked):
    (run,) = runs("b=1")
    reader = Reader()
    reader.meet([run])
    for _ in range(2):
        assert reader.find("none", run, lambda it: asked.append(it.training.micro_batch_size)) is None
    assert asked == [1]


def test_arrays_stand_in_for_numbers_in_a_run_that_watches_too():
    first, second = runs("recompute=none", "recompute=full")
    reader = Reader()
    reader.meet([first, second])

    def tokens(run):
        return changed(run, micro_batch_size=np.array([1, 2])).training.micro_batch_size * run.training.sequence_length

    assert reader.find("tokens", first, tokens).tolist() == [1024, 2048]
    assert reader.find("tokens", second, tokens) is reader.find("tokens", first, tokens)
    assert changed(first, recompute="full") == second


def test_what_the_estimate_finds_of_a_run_that_watches_is_what_it_finds_of_the_run():
    several = runs("zero_stage=1 data_parallel=4", "zero_stage=3 data_parallel=4", "tensor_parallel=2 recipe=pure")
    reader = Reader()
    reader.meet(several)
    for run in several:
        watched = reader.find("peak", run, lambda it: state_peak(it, stages_of(it)[0]))
        assert watched == state_peak(run, stages_of(run)[0])
