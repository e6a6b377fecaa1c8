"""The GPUs on which a token costs least, by prices that the user gives: every number that is tried is looked at here."""

import json
from collections.abc import Callable

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.report.screens.fit_text import amount
from memcalc.search.costs import costs_of
from memcalc.search.layouts import Space
from memcalc.search.offers import parse_prices
from memcalc.search.ranking import rank
from memcalc.spec.hardware.gpus import find_gpu
from memcalc.spec.hardware.interconnect import system_of
from tests.cli.conftest import Run, run  # noqa: F401 -- the fixture that runs a command

PRICES = {"h100-80gb": 2.10, "rtx-4090": 0.40, "t4": 0.10}
RUN = ("llama-3.2-3b", "l=10", "recipe=mixed-16")


def test_costs_are_prices_times_gpus_times_seconds() -> None:
    answer = memcalc.fit(*RUN, minimize="cost", prices=PRICES, gpus=4)
    first, second, last = answer.offers

    assert [offer.gpu.name for offer in answer.offers] == ["h100-80gb", "rtx-4090", "t4"]
    for offer in (first, second):
        assert offer.layouts is not None
        best = offer.layouts.best[0].result
        step = costs_of(best.spec, offer.system).total  # seconds of a step; of 2,048 tokens in each sequence
        assert best.fits
        assert best.spec.parallelism.ranks == offer.layouts.gpus
        assert offer.hourly == offer.price * offer.layouts.gpus
        dollars = offer.hourly * step / 3600 / (offer.layouts.sequences * 2048)
        assert offer.of_tokens == pytest.approx(dollars * 1e6, rel=1e-12)
    assert first.of_tokens <= second.of_tokens
    assert (last.layouts, last.lacks, last.verdict) == (
        None,
        "no bf16 matrix units; no flash attention",
        "does-not-fit",
    )
    assert (answer.gpu.name, answer.gpus, answer.verdict) == ("h100-80gb", first.layouts and first.layouts.gpus, "fits")
    assert answer.best == (first.layouts and first.layouts.best)


@pytest.mark.long
def test_more_gpus_are_chosen_where_a_token_costs_less_on_them() -> None:
    """From the fewest that are enough, doubled as long as a token costs less: sized here one by one."""
    spec, card = memcalc.load(*RUN, gpu="rtx-4090"), find_gpu("rtx-4090")
    system = system_of(card)

    def seconds(gpus: int) -> float | None:
        fitting = rank(Space(spec, gpus, system.node, gpus), system, spec).fitting
        return fitting[0].costs.total * gpus / (gpus * 2048) if fitting else None

    fewest = next(gpus for gpus in range(1, 9) if seconds(gpus) is not None)
    tried = [seconds(fewest)]
    while len(tried) < 2 or (tried[-1] or 9) < (tried[-2] or 9):
        tried.append(seconds(fewest * 2 ** len(tried)))
    expected = fewest * 2 ** (len(tried) - 2)
    (offer,) = memcalc.fit(*RUN, minimize="cost", prices={"rtx-4090": 1.0}, gpus=64).offers

    assert offer.layouts is not None
    assert offer.layouts.gpus == expected
    assert offer.layouts.seconds == pytest.approx(tried[-2])


def test_a_price_moves_the_order_and_nothing_else() -> None:
    cheap = memcalc.fit("gpt2", minimize="cost", prices={"h100-80gb": 2.0, "a100-80gb": 0.1})
    dear = memcalc.fit("gpt2", minimize="cost", prices={"h100-80gb": 2.0, "a100-80gb": 10.0})

    assert (cheap.gpu.name, dear.gpu.name) == ("a100-80gb", "h100-80gb")
    by_name = {offer.gpu.name: offer for offer in dear.offers}
    for offer in cheap.offers:
        other = by_name[offer.gpu.name]
        assert offer.of_tokens / offer.price == pytest.approx(other.of_tokens / other.price)


@pytest.mark.long
def test_a_budget_holds_for_every_gpu() -> None:
    answer = memcalc.fit("llama-3.2-1b", "hardware.budget=16GiB", minimize="cost", prices={"h100": 2, "a100-80gb": 1})

    for offer in answer.offers:
        assert offer.gpu.usable_bytes == 16 * 2**30
        assert offer.layouts is not None
        assert (offer.layouts.best[0].result.headline.device_bytes or 0) <= 16 * 2**30


def test_nothing_fits(run: Callable[..., Run]) -> None:  # noqa: F811
    done = run("fit", "llama-3-70b", "--minimize", "cost", "--price", "4090=0.4", "--gpus", "4")

    assert done.code == 1
    assert "The run fits on none of these GPUs, with up to 4 of each." in done.out
    assert memcalc.fit("llama-3-70b", minimize="cost", prices={"4090": 0.4}, gpus=4).verdict == "does-not-fit"


def test_the_document_has_every_offer(run: Callable[..., Run]) -> None:  # noqa: F811
    words = ["--price", "h100-80gb=2.1", "--price", "t4=.1"]
    found = json.loads(run("fit", "gpt2", "--minimize", "cost", *words, "--format", "json").out)["minima"]["cost"]

    assert [offer["name"] for offer in found] == ["h100-80gb", "t4"]
    assert (found[0]["gpus"], found[0]["all_per_hour"], found[0]["layout"]["data_parallel"]) == (1, 2.1, 1)
    assert (found[1]["gpus"], found[1]["per_million_tokens"], found[1]["verdict"]) == (None, None, "does-not-fit")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--minimize cost", "--minimize cost and --price need each other. Write --minimize cost --price GPU=PRICE"),
        ("--price h100=2", "--minimize cost and --price need each other."),
        ("--minimize cost --price h100=2 --gpu h100", "Leave --gpu out."),
        ("--minimize cost --price h100=2 --price h100-80gb=3", "h100-80gb has two prices."),
        ("--minimize cost --price h100", "'h100' is not a price. Write GPU=PRICE"),
        ("--minimize cost --price h100=$2", "'h100=$2' is not a price."),
        ("--minimize cost --price h100=-2", "the price of h100 is -2 per hour. Set a price above 0"),
        ("--minimize cost --price h100=nan", "Set a price above 0"),
        ("--minimize cost --price h1000=2", "--price: 'h1000' is not a known GPU. Nearest: h100-80gb"),
        ("--minimize cost --price 12GiB=2", "'12GiB' is not in `memcalc gpus`."),
    ],
)
def test_wrong_prices_are_one_message(words: str, message: str, run: Callable[..., Run]) -> None:  # noqa: F811
    done = run("fit", "gpt2", *words.split())

    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert done.err.count("error:") == 1


def test_prices_are_read_in_their_order() -> None:
    assert list(parse_prices(["b=1", "a=2.5"]).items()) == [("b", 1.0), ("a", 2.5)]
    with pytest.raises(InputError, match="a has two prices"):
        parse_prices(["a=1", "a=2"])


@pytest.mark.parametrize(
    ("price", "text"), [(1234.5, "1,234.50"), (2.1, "2.10"), (0.4, "0.40"), (0.361, "0.361"), (0.01834, "0.0183")]
)
def test_amounts(price: float, text: str) -> None:
    assert amount(price) == text
