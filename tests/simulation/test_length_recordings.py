"""Orders of batch lengths that share a recording: each has the requests of a run that is recorded by itself."""

import pytest

import memcalc
from memcalc.simulation.batch_lengths import orders_of
from memcalc.simulation.length_recordings import LengthRecordings, Shape, can_share
from memcalc.simulation.simulated_run import SimulatedRun, replayed_requests, run_requests
from memcalc.stream.requests import Requests, replay

VARIES = "variable_lengths=true"
RUNS = [
    # 3072 indices and fewer of an embedding need no workspace (ATen native/cuda/Embedding.cu): of 4 * 1024 tokens only
    # batches of 7/8 and more do.
    ("gpt2", ("b=4", "s=1024", "num_layers=2")),
    ("llama-3.2-1b", ("b=3", "s=800", "l=4", "lora.rank=8", "recompute=full", "gradient_accumulation_steps=3")),
    ("gpt2", ("b=2", "s=512", "num_layers=3", "data_parallel=4", "zero_stage=3")),
    ("gpt2", ("b=2", "s=512", "num_layers=3", "data_parallel=2", "gradient_accumulation_steps=2")),
    ("gpt2", ("b=1", "s=64", "num_layers=2", "tensor_parallel=4", "recipe=amp")),
    ("mixtral-8x7b", ("b=1", "s=256", "l=2", "recipe=pure")),  # its sorts have other workspaces for few tokens
]
WINDOW = ("b=1", "s=4096", "num_layers=2", "implementation=huggingface", "attention=memory-efficient")


def requests_of(requests: Requests) -> list[tuple[str, bool, list[int]]]:
    """The requests by interval, without empty ones, with the others counted from 0."""
    made, number = dict[int, int](), 0
    found = []
    for each in requests.stretches:
        script: list[int] = []
        for change in each.script:
            if change > 0:
                made[number] = len(made)
            script += [change if change > 0 else ~made[~change]] if change else []
            number += change >= 0
        found.append((each.phase, each.after_empty_cache, script))
    return found


@pytest.mark.parametrize(("preset", "words"), RUNS)
def test_a_shared_recording_has_the_requests_of_each_order(preset: str, words: tuple[str, ...]) -> None:
    spec = memcalc.load(preset, *words, VARIES)

    assert can_share(spec)
    for lengths in orders_of(spec):
        alone = SimulatedRun(spec, Requests(), lengths=lengths).play()
        shared = run_requests(spec, lengths=lengths)
        assert requests_of(shared) == requests_of(alone)
        assert replay(shared).tops == replay(alone).tops


@pytest.mark.parametrize(
    ("preset", "words"), [*RUNS, ("gpt2", ("evaluation_batch_size=2",)), ("gpt2", ("empty_cache_steps=2",))]
)
def test_batches_of_one_length_share_it(preset: str, words: tuple[str, ...]) -> None:
    """They have the requests of fewer steps, up to what the next step frees before it begins."""
    spec = memcalc.load(preset, *words, VARIES)
    alone, shared = run_requests(spec), replayed_requests(spec)
    most = len(alone.stretches[-1].script)

    assert shared.stretches[:-1] == alone.stretches[:-1]
    assert shared.stretches[-1].script[:most] == alone.stretches[-1].script
    assert all(change < 0 for change in shared.stretches[-1].script[most:])
    assert shared.steady == alone.steady


@pytest.mark.parametrize(("preset", "words"), RUNS[:-1])
def test_all_orders_share_one_recording(preset: str, words: tuple[str, ...]) -> None:
    spec = memcalc.load(preset, *words, VARIES)
    recordings = LengthRecordings(spec, None)
    for lengths in orders_of(spec):
        recordings.requests(lengths)

    assert len(recordings._known) == 1


def test_an_order_with_other_blocks_is_recorded() -> None:
    """Mistral's window has 4096 tokens: only the longest batches fill it, and have a mask (masking_utils.py)."""
    spec = memcalc.load("mistral-7b", *WINDOW, VARIES)
    recordings = LengthRecordings(spec, None)
    for lengths in orders_of(spec):
        alone = SimulatedRun(spec, Requests(), lengths=lengths).play()
        assert requests_of(recordings.requests(lengths)) == requests_of(alone)

    assert len(recordings._known) > 1


@pytest.mark.parametrize("words", [("teacher=gpt2",), ("pairs=true", "reference_model=true")])
def test_teachers_and_references_have_sizes_of_their_own(words: tuple[str, ...]) -> None:
    assert not can_share(memcalc.load("gpt2", *words, VARIES))


def test_a_shape_covers_those_with_fewer_bytes() -> None:
    shape = Shape([False, False, True], {1: [0, 1, ~0, ~1]})

    assert shape.covers(shape)
    assert shape.covers(Shape([False, True, True], {1: []}))
    assert not Shape([False, True, True], {1: []}).covers(shape)
    assert not shape.covers(Shape([False, False, True], {1: [0, 1, ~1, ~0]}))  # frees them in another order


@pytest.mark.parametrize("settings", ["", pytest.param("expandable_segments:True", marks=pytest.mark.long)])
@pytest.mark.parametrize(("preset", "words"), RUNS)
def test_a_step_of_an_order_that_is_left_out_changes_nothing(
    preset: str, words: tuple[str, ...], settings: str
) -> None:
    spec = memcalc.load(preset, *words, VARIES)
    for lengths in orders_of(spec):
        requests = SimulatedRun(spec, Requests(), lengths=lengths).play()
        found = replay(requests, settings)
        requests.steady.clear()
        assert found == replay(requests, settings)


def test_the_last_step_repeats_the_one_of_its_lengths() -> None:
    """Of steps with 1, 8, 6 and 8 eighths the last one is like the second; of steps with two batches each none is."""
    for accumulation, expected in ((1, [1, 3]), (2, [])):
        spec = memcalc.load("gpt2", "num_layers=2", VARIES, f"gradient_accumulation_steps={accumulation}")
        run = SimulatedRun(spec, Requests(), lengths=orders_of(spec)[0])
        steady = run.play().steady

        assert [run.steady_steps.index(each) + 1 for each in steady] == expected
