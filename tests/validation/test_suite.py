"""Suites: what their files may hold, and how the largest micro-batch is searched for."""

from __future__ import annotations

from pathlib import Path

import pytest

import memcalc
from memcalc.errors import InputError, Unavailable
from memcalc.measuring.measurement import MeasuredDevice
from memcalc.validation.max_micro_batch import MOST, LargestMicroBatch, estimated, peak, predicted
from memcalc.validation.suite import alone_with, load_suite
from memcalc.validation.summary import PredictionErrors

SUITE = Path(__file__).parents[2] / "benchmarks" / "suite.yaml"
CARD = MeasuredDevice("cuda", "cuda:0", "NVIDIA H100 80GB HBM3", total_bytes=79 * 2**30, context_bytes=2**29)


def test_the_projects_own_suite_has_what_a_sitting_on_a_gpu_is_for() -> None:
    suite = load_suite(SUITE)
    specs = [run.spec() for run in suite.runs]
    trainings = [spec.training for spec in specs]

    assert len(suite.runs) >= 60
    assert len({run.command() for run in suite.runs}) == len(suite.runs)
    assert {spec.name for spec in specs} >= {"gpt2", "gpt2-xl", "codegen-350m", "llama-3.2-1b", "llama-3-8b"}
    assert {training.attention for training in trainings} == {"eager", "flash", "memory-efficient"}
    assert {training.recipe for training in trainings} >= {"fp32", "amp", "pure", "mixed-16", "mixed-18", "mixed-20"}
    assert {training.optimizer_implementation for training in trainings} == {"foreach", "fused", "for-loop"}
    assert {training.zero_grad for training in trainings} == {"set_to_none", "zero"}
    assert {training.implementation for training in trainings} == {"plain", "huggingface"}
    assert len(suite.largest) >= 3


def test_paths_are_relative_to_the_suite(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("{name: mine, preset: gpt2}")
    (tmp_path / "suite.yaml").write_text("{steps: 1, runs: [mine.yaml b=3, {run: gpt2, steps: 5, alloc_conf: 'x:1'}]}")
    mine, other = load_suite(tmp_path / "suite.yaml").runs

    assert (mine.spec().name, mine.spec().training.micro_batch_size, mine.steps) == ("mine", 3, 1)
    assert (other.steps, other.alloc_conf) == (5, "x:1")
    assert other.command("b=2") == "memcalc measure gpt2 --set b=2 --steps 5 --alloc-conf x:1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gpt2]", r"suite\.yaml: a suite needs runs, .*; the file has a list\."),
        ("{runs: [gpt2], cards: []}", r"the file has runs, cards\."),
        ("{runs: [1]}", r"suite\.yaml: runs\[0\]: 1 is not a run\."),
        ("{runs: [gpt2, gpt2 b=0]}", r"suite\.yaml: runs\[1\]: .*micro_batch_size"),
        ("{runs: [no-such-model]}", r"suite\.yaml: runs\[0\]: "),
        ("{runs: [", "this is not YAML"),
    ],
)
def test_a_file_that_is_no_suite(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        load_suite(tmp_path / "suite.yaml")


def test_a_missing_suite(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.yaml: the file cannot be read: No such file"):
        load_suite(tmp_path / "none.yaml")


def test_two_sittings_with_one_file(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    with alone_with(records), pytest.raises(Unavailable, match="another suite adds to it"), alone_with(records):
        pass
    with alone_with(records):
        pass


@pytest.mark.parametrize("truth", [0, 1, 2, 9, 10, 11, 12, 30, 77])
@pytest.mark.parametrize("guess", [None, 0, 1, 10, 40])
def test_the_search_finds_the_largest_that_fits(truth: int, guess: int | None) -> None:
    """The search is independent of the prediction, and needs two runs if the prediction is right."""
    search = LargestMicroBatch("x", guess)
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= truth

    search.search(fits)

    assert search.found == truth
    assert len(tried) == len(set(tried)) <= 2 + 2 * max(truth, guess or 1).bit_length()
    if truth == guess and truth:
        assert tried == [truth, truth + 1]


def test_no_batch_above_the_most_is_tried() -> None:
    search = LargestMicroBatch("x", None)
    search.search(lambda batch: batch <= MOST or pytest.fail(f"{batch} is tried"))

    assert search.found == MOST


def test_the_predicted_batch_is_the_last_with_an_estimate_that_fits() -> None:
    spec = memcalc.load("gpt2", "recipe=pure")
    room = CARD.total_bytes - CARD.context_bytes  # type: ignore[operator] # both are given above
    batch = estimated(spec, room)

    assert batch is not None
    assert peak(spec, batch) <= room < peak(spec, batch + 1)
    assert predicted(spec, MeasuredDevice("cpu", "cpu", "x")) is None


def test_errors_are_signed() -> None:
    """-3 % ... +2 %: three of five are under; 95 of a hundred, of five the fifth, are within 3 %."""
    errors = PredictionErrors("allocated", (-0.03, -0.01, -0.01, 0.0, 0.02))

    assert (errors.median, errors.p95, errors.worst, errors.under) == (-0.01, 0.03, -0.03, 0.6)


def test_the_lock_is_beside_the_records_and_goes(tmp_path: Path) -> None:
    """With this user's rights; one that a killed suite left is taken over."""
    records = tmp_path / "records.jsonl"
    lock = tmp_path / ".records.jsonl.lock"
    lock.touch()
    with alone_with(records):
        assert lock.stat().st_mode & 0o022 == 0
        with pytest.raises(Unavailable, match=r"records\.jsonl is busy"), alone_with(records):
            pass
        assert lock.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / ".records.jsonl.lock").symlink_to("/dev/null")

    with (
        pytest.raises(Unavailable, match=r"\.records\.jsonl\.lock could not be written"),
        alone_with(tmp_path / "records.jsonl"),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{runs: [gpt2], steps: 1000000000}", "steps = 1000000000 is not a number from 1 to 1,000"),
        ("{runs: [{run: gpt2, steps: true}]}", r"runs\[0\]: steps = True is not a number"),
        ("{runs: gpt2}", "runs is 'gpt2', not a list"),
        ("{runs: [{run: gpt2, alloc_conf: 5}]}", "is not a run"),
        ("{runs: ['']}", "is not a run"),
        ("!!python/object/apply:os.system ['true']", "is not a type of value that a configuration has"),
    ],
)
def test_a_suite_is_bounded(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        load_suite(tmp_path / "suite.yaml")
