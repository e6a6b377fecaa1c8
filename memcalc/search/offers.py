"""The type and number of GPUs with the lowest cost per token, from prices that the user gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from memcalc.errors import InputError
from memcalc.ledger.verdict import Answer
from memcalc.progress import Progress, silent
from memcalc.search.costs import fixed_sequences, step_sequences, token_seconds
from memcalc.search.layouts import ExcludedLayout, Space
from memcalc.search.minima import fewest_gpus, lacking
from memcalc.search.ranking import BestLayout, Ranking, best_of, rank
from memcalc.search.variants import Reader, varied
from memcalc.spec.hardware.gpus import GpuSpec, find_gpu
from memcalc.spec.hardware.interconnect import System, system_of
from memcalc.spec.spec import Spec
from memcalc.suggestions.run_overrides import as_is

HOUR = 3600  # seconds
TOKENS = 1_000_000  # unit of the printed cost
FORM = "GPU=PRICE, the price of one GPU for one hour, e.g. h100-80gb=2.10"


class OfferLayouts(NamedTuple):
    """The layouts over one number of GPUs of one type."""

    gpus: int
    sequences: int
    ranking: Ranking
    best: list[BestLayout]
    pruned: dict[ExcludedLayout, int]
    seconds: float  # GPU seconds per token, by the cost model, in the cheapest layout


@dataclass(frozen=True, slots=True)
class Offer:
    """A type of GPU at its price."""

    gpu: GpuSpec  # the GPU
    price: float  # of one GPU for one hour, in the currency of the user
    system: System  # the node and network of the GPU
    layouts: OfferLayouts | None  # the number of GPUs with the lowest cost per token; None: no number tried is enough
    may_be_fewer: bool  # whether a layout over fewer GPUs may fit, or, if no number is enough, over any
    lacks: str  # features that the run needs and the GPU lacks, regardless of memory; "": none

    @property
    def hourly(self) -> float | None:
        """The price of all GPUs for one hour; None if nothing fits."""
        return None if self.layouts is None else self.price * self.layouts.gpus

    @property
    def of_tokens(self) -> float:
        """The cost of a million tokens by the cost model; infinite if nothing fits."""
        return inf if self.layouts is None else self.price * self.layouts.seconds * TOKENS / HOUR

    @property
    def verdict(self) -> Answer:
        """Whether some layout over some number of these GPUs fits."""
        if self.layouts is not None:
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
            raise InputError(f"{name} has two prices.", "Set one price for each GPU.", "--price")
        prices[name] = price
    return prices


def checked_prices(prices: Mapping[str, float]) -> dict[GpuSpec, float]:
    """Return the GPUs with their prices.

    Raises:
        InputError: a GPU is unknown, has a custom size or is repeated, or a price is not positive.
    """
    found: dict[GpuSpec, float] = {}
    for name, price in prices.items():
        try:
            gpu = find_gpu(name)
        except InputError as error:
            raise error.located("--price") from None
        if gpu.name != gpu.row:
            raise InputError(
                f"{name[:60]!r} is not in `memcalc gpus`.", f"Write {FORM}; sizes go with --budget.", "--price"
            )
        if not 0 < price < inf:
            raise InputError(f"the price of {name} is {price:g} per hour.", f"Set a price above 0: {FORM}.", "--price")
        if gpu in found:
            raise InputError(f"{gpu.name} has two prices.", "Set one price for each GPU.", "--price")
        found[gpu] = float(price)
    return found


class OfferSearch(NamedTuple):
    """Options of the search, the same for every type of GPU."""

    fixed_fields: frozenset[str]  # fields that keep the run's own value
    most: int  # maximum number of GPUs of one type
    top: int  # number of layouts to return in full
    progress: Progress = silent  # called with the number of layouts done
    as_read: Reader = as_is  # returns a variant as the run's file is read


def offers(
    spec: Spec,
    prices: Mapping[GpuSpec, float],
    search: OfferSearch,
    node: int | None = None,
    nic_gbit: float | None = None,
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
    found = [_offer(spec, gpu, price, search, system_of(gpu, node, nic_gbit)) for gpu, price in prices.items()]
    return sorted(found, key=lambda offer: (offer.of_tokens, offer.price, offer.gpu.name))


def _offer(spec: Spec, gpu: GpuSpec, price: float, search: OfferSearch, system: System) -> Offer:
    _, sign, budget = (spec.hardware.gpu or "").partition(":")  # of memory, the same for every GPU
    gpu = find_gpu(f"{gpu.name}{sign}{budget}")
    run = varied(spec, hardware={"gpu": gpu.name})
    if lacks := lacking(run, gpu):
        return Offer(gpu, price, system, None, may_be_fewer=False, lacks=lacks)
    fixed_fields, most, _, progress, as_read = search
    batch = fixed_sequences(run)
    fewest, may_be_fewer = fewest_gpus(run, gpu, system, batch, fixed_fields, most, progress=progress, as_read=as_read)
    chosen: OfferLayouts | None = None
    for found in _doubled(run, system, fewest, search):
        if chosen is not None and found.seconds >= chosen.seconds:
            break
        chosen = found
    return Offer(gpu, price, system, chosen, may_be_fewer, "")


def _doubled(run: Spec, system: System, fewest: int | None, search: OfferSearch) -> Iterator[OfferLayouts]:
    """Yield the layouts over the fewest GPUs, twice as many, and so on; numbers on which nothing fits are omitted."""
    gpus = fewest or search.most + 1
    while gpus <= search.most:
        sequences = step_sequences(run, gpus)
        space = Space(run, gpus, system.node, sequences, search.fixed_fields)
        ranking = rank(space, system, run, search.fixed_fields, search.top, search.progress, as_read=search.as_read)
        if best := best_of(ranking, search.top, search.as_read):
            seconds = token_seconds(best[0].result.spec, system)
            yield OfferLayouts(gpus, sequences, ranking, best, dict(space.pruned), seconds)
        gpus *= 2
