"""The type and number of GPUs with the lowest cost per token, from prices that the user gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from memcalc.errors import InputError
from memcalc.fitting.costs import fixed_sequences, step_sequences, token_seconds
from memcalc.fitting.layouts import Pruned, Space
from memcalc.fitting.minima import fewest_gpus, lacking
from memcalc.fitting.ranking import Best, Ranking, best_of, rank
from memcalc.fitting.varying import varied
from memcalc.ledger.verdict import Answer
from memcalc.progress import Progress, silent
from memcalc.spec.cards import Card, find_card
from memcalc.spec.spec import Spec
from memcalc.spec.systems import System, system_of

HOUR = 3600  # seconds
TOKENS = 1_000_000  # unit of the printed cost
FORM = "GPU=PRICE, the price of one GPU for one hour, e.g. h100-80gb=2.10"


class Found(NamedTuple):
    """The layouts over one number of GPUs of one type."""

    gpus: int
    sequences: int
    ranking: Ranking
    best: list[Best]
    pruned: dict[Pruned, int]
    seconds: float  # GPU seconds per token, by the cost model, in the cheapest layout


@dataclass(frozen=True, slots=True)
class Offer:
    """A type of GPU at its price.

    Args:
        card: the GPU.
        price: of one GPU for one hour, in the currency of the user.
        system: the node and network of the GPU.
        found: the number of GPUs with the lowest cost per token; None: no number tried is enough.
        may_be_fewer: whether a layout over fewer GPUs may fit, or, if no number is enough, over any.
        lacks: features that the run needs and the GPU lacks, regardless of memory; "": none.
    """

    card: Card
    price: float
    system: System
    found: Found | None
    may_be_fewer: bool
    lacks: str

    @property
    def hourly(self) -> float | None:
        """The price of all GPUs for one hour; None if nothing fits."""
        return None if self.found is None else self.price * self.found.gpus

    @property
    def of_tokens(self) -> float:
        """The cost of a million tokens by the cost model; infinite if nothing fits."""
        return inf if self.found is None else self.price * self.found.seconds * TOKENS / HOUR

    @property
    def verdict(self) -> Answer:
        """Whether some layout over some number of these GPUs fits."""
        if self.found is not None:
            return "fits"
        return "unknown" if self.may_be_fewer and not self.lacks else "does-not-fit"


def parse_prices(words: Iterable[str]) -> dict[str, float]:
    """Return prices by GPU, from words such as "h100-80gb=2.10".

    Raises:
        InputError: a word is not a GPU with a price, or repeats a GPU.
    """
    prices: dict[str, float] = {}
    for word in words:
        name, sign, amount = word.partition("=")
        try:
            price = float(amount)
        except ValueError:
            sign = ""
        if not sign or not name:
            raise InputError(f"{word[:60]!r} is not a price.", f"Write {FORM}.", "--price")
        if name in prices:
            raise InputError(f"{name} has two prices.", "Give one price for each GPU.", "--price")
        prices[name] = price
    return prices


def checked_prices(prices: Mapping[str, float]) -> dict[Card, float]:
    """Return the GPUs with their prices.

    Raises:
        InputError: a GPU is unknown, has a custom size or is repeated, or a price is not positive.
    """
    found: dict[Card, float] = {}
    for name, price in prices.items():
        try:
            card = find_card(name)
        except InputError as error:
            raise error.located("--price") from None
        if card.name != card.row:
            raise InputError(
                f"{name[:60]!r} is not in `memcalc gpus`.", f"Write {FORM}; sizes go with --budget.", "--price"
            )
        if not 0 < price < inf:
            raise InputError(f"{name} for {price:g} per hour.", f"Give a price above 0: {FORM}.", "--price")
        if card in found:
            raise InputError(f"{card.name} has two prices.", "Give one price for each GPU.", "--price")
        found[card] = float(price)
    return found


class Search(NamedTuple):
    """Options of the search, the same for every type of GPU.

    Args:
        held: fields that keep the run's own value.
        most: maximum number of GPUs of one type.
        top: number of layouts to return in full.
        progress: called with the number of layouts done.
    """

    held: frozenset[str]
    most: int
    top: int
    progress: Progress = silent


def offers(
    spec: Spec, prices: Mapping[Card, float], search: Search, node: int | None = None, nic_gbit: float | None = None
) -> list[Offer]:
    """Return an offer for every GPU with a price, the one with the lowest cost per token first.

    For each type the fewest GPUs that are enough are tried, then twice as many, while the cost per token falls: more
    GPUs may avoid recomputation, but communicate more.

    Args:
        spec: the run.
        prices: of one GPU for one hour.
        search: options of the search.
        node: GPUs per node; None: from the GPU's table.
        nic_gbit: network bandwidth per GPU in 10^9 bit/s; None: from the table.
    """
    found = [_offer(spec, card, price, search, system_of(card, node, nic_gbit)) for card, price in prices.items()]
    return sorted(found, key=lambda offer: (offer.of_tokens, offer.price, offer.card.name))


def _offer(spec: Spec, card: Card, price: float, search: Search, system: System) -> Offer:
    _, sign, budget = (spec.hardware.gpu or "").partition(":")  # of memory, the same for every GPU
    card = find_card(f"{card.name}{sign}{budget}")
    run = varied(spec, hardware={"gpu": card.name})
    if lacks := lacking(run, card):
        return Offer(card, price, system, None, may_be_fewer=False, lacks=lacks)
    held, most, _, progress = search
    fewest, may_be_fewer = fewest_gpus(run, card, system, fixed_sequences(run), held, most, progress)
    chosen: Found | None = None
    for found in _doubled(run, system, fewest, search):
        if chosen is not None and found.seconds >= chosen.seconds:
            break
        chosen = found
    return Offer(card, price, system, chosen, may_be_fewer, "")


def _doubled(run: Spec, system: System, fewest: int | None, search: Search) -> Iterator[Found]:
    """Yield the layouts over the fewest GPUs, twice as many, and so on; numbers on which nothing fits are omitted."""
    gpus = fewest or search.most + 1
    while gpus <= search.most:
        sequences = step_sequences(run, gpus)
        space = Space(run, gpus, system.node, sequences, search.held)
        ranking = rank(space, system, run, search.held, search.progress)
        if best := best_of(ranking, search.top):
            seconds = token_seconds(best[0].result.spec, system)
            yield Found(gpus, sequences, ranking, best, dict(space.pruned), seconds)
        gpus *= 2
