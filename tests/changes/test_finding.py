"""Changes that fit do fit; pairs are of what is not enough alone, and milder ones would not do."""

import pytest

import memcalc
from memcalc.changes.candidates import RESULTS, candidates
from memcalc.changes.finding import Finder
from memcalc.ledger.result import Result

RUNS = [
    ("gpt2-large", ("b=8", "recipe=amp", "attention=eager"), "rtx-4090"),
    ("llama-3-8b", ("b=2", "recipe=pure"), "h100-80gb"),
    ("llama-3-8b", ("data_parallel=8", "recipe=mixed-16", "s=8192"), "a100-40gb"),
    ("gpt2-large", ("tensor_parallel=2", "b=16"), "v100-16gb"),
]


def finder(name: str, overrides: tuple[str, ...], card: str) -> Finder:
    spec = memcalc.load(name, *overrides, gpu=card)

    def judge(result: Result) -> tuple[int, bool | None]:
        return result.headline.device_bytes or 0, result.fits

    return Finder(spec, candidates(spec), memcalc.estimate(spec).ledger.peak_bytes, judge)


@pytest.mark.parametrize(("name", "overrides", "card"), RUNS)
def test_each_is_what_the_estimate_says(name: str, overrides: tuple[str, ...], card: str) -> None:
    """Written after the run's own --set, each gives the run that was sized."""
    found = finder(name, overrides, card)
    before = memcalc.estimate(name, *overrides, gpu=card)

    assert not before.fits
    for change in [*found.singles(), *found.pairs()]:
        after = memcalc.estimate(name, *overrides, *change.overrides, gpu=card)
        assert change.allocated == after.ledger.peak_bytes
        assert change.saved == before.ledger.peak_bytes - after.ledger.peak_bytes > 0
        assert change.needed == after.headline.device_bytes
        assert change.fits == after.fits
        assert change.spec == after.spec
        assert change.result in RESULTS


@pytest.mark.parametrize(("name", "overrides", "card"), RUNS)
def test_neither_half_of_a_pair_is_enough(name: str, overrides: tuple[str, ...], card: str) -> None:
    found = finder(name, overrides, card)
    enough = {change.levers[0] for change in found.singles() if change.fits}

    for pair in found.pairs():
        assert len(pair.levers) == 2
        assert enough.isdisjoint(pair.levers)


def test_of_one_lever_the_mildest() -> None:
    """Of micro-batches 4, 2 and 1 the largest that fits; of two, four and eight times the cards the fewest."""
    spec = ("gpt2-xl", "b=8", "recipe=pure", "recompute=full", "loss=chunked")
    found = finder(spec[0], ("b=64", *spec[2:]), "rtx-3090")
    (change,) = [change for change in found.singles() if change.levers == ("smaller micro-batch",)]
    size = change.spec.training.micro_batch_size

    assert change.fits
    assert not memcalc.estimate(
        spec[0], *spec[2:], f"b={2 * size}", "gradient_accumulation_steps=2", gpu="rtx-3090"
    ).fits
