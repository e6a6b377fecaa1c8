"""Chains that a YAML file describes: blocks by their sizes, alone or in parallel branches that are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from memcalc.errors import DoesNotFit, InputError
from memcalc.files import read_bytes, read_text
from memcalc.planning.chain import Block, Chain, join, simple_block
from memcalc.planning.evaluation import Evaluation, evaluate, evaluate_all_kept
from memcalc.planning.gain import Gain, gain_of
from memcalc.planning.plan import Plan, Segment
from memcalc.planning.planner import STRATEGIES
from memcalc.planning.strategies.optimal import Found, front, optimal
from memcalc.planning.strategies.smallest import smallest
from memcalc.planning.throughput import slow_down
from memcalc.spec.cards import Card, find_card
from memcalc.spec.fields import describe
from memcalc.spec.yaml_source import parse_yaml
from memcalc.units import format_bytes, parse_bytes
from memcalc.verdict.kinds import ONE_GPU
from memcalc.verdict.recorded import reserve_ratio


def _size(given: Any) -> Any:
    return parse_bytes(given) if isinstance(given, str) else given


# A size, up to more than any computer has: sums of many still fit the 64 bits that plans are computed in.
Size = Annotated[int, BeforeValidator(_size), Field(ge=0, le=2**50)]
MOST_BLOCKS = 200  # in a row: some 10 seconds, which grow with the square
GIVEN = "given"  # in place of a strategy: the user's own plan
MOST_SAMPLES = 2**40  # of a batch
MOST_FLOPS = 2**57  # of a block: with more, all blocks together would not fit those bits


class _Described(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BlockSizes(_Described):
    """One block, or several that are alike; see `memcalc.planning.chain.simple_block`."""

    name: str = "block"
    count: Annotated[int, Field(ge=1, le=10_000)] = 1
    input: Size
    inside: Size = 0
    output: Size
    flops: Annotated[float, Field(ge=0, le=MOST_FLOPS)] = 0
    left: Size = 0
    temporary: Size = 0
    recomputable: bool = True


class ChainSizes(_Described):
    """Blocks in the order of forward; or one branch of several that read `input` and are joined.

    With `batch` all sizes but `resident` and `left` are of one sample, and so are FLOPs.
    """

    batch: Annotated[int, Field(ge=1, le=2**31)] = 1
    resident: Size = 0
    blocks: Annotated[list[BlockSizes], Field(min_length=1)]
    branches: Annotated[int, Field(ge=1, le=10_000)] = 1
    input: Size = 0
    joined: list[BlockSizes] = []


class ChainFile(_Described):
    """The file."""

    name: str = "chain"
    chain: ChainSizes


class Span(NamedTuple):
    """A chain all of whose blocks are planned, as `memcalc.planning.configured.Configured` has it."""

    chain: Chain
    first: int
    stop: int


class Reserve(NamedTuple):
    """What a GPU must have for what a chain allocates: a chain has no requests that could be replayed.

    Args:
        room_bytes: of the GPU, less its context.
        ratio: the most that recorded runs reserved for what they allocated.
        runs: how many were recorded.
        kind: of runs.
    """

    room_bytes: int
    ratio: float
    runs: int
    kind: str


class ChainPlanning(NamedTuple):
    """The answer for a chain.

    Args:
        name: what the file calls it.
        batch: samples, where the file's sizes are of one; else 1.
        configured: the chain.
        budget: bytes that may be allocated.
        reserve: what the budget rests on, where a GPU is named; None: it was given.
        found: the plan.
        rules: what the rules of thumb need and cost.
        front: plans from the smallest to the fastest; of a given plan none.
        gain: the largest batches that fit; None: not asked for.
    """

    name: str
    batch: int
    configured: Span
    budget: int
    reserve: Reserve | None
    found: Found
    rules: tuple[tuple[str, Evaluation], ...]
    front: tuple[Found, ...]
    gain: Gain | None


def describes_chain(path: str) -> bool:
    """Whether this is a YAML file with `chain:` in it."""
    if not path.endswith((".yaml", ".yml")):
        return False
    try:
        text = read_bytes(path).decode(errors="replace")
    except InputError:  # whoever reads it as a configuration says why
        return False
    return any(line.startswith("chain:") for line in text.splitlines())


class DescribedChain(NamedTuple):
    """A file that was read.

    Args:
        path: of the file, for messages.
        name: what the file calls the chain.
        sizes: of its blocks.
    """

    path: str
    name: str
    sizes: ChainSizes

    def chain(self, batch: int | None = None) -> Chain:
        """The chain with so many samples; None: as many as the file says."""
        sizes = self.sizes
        batch = sizes.batch if batch is None else batch
        blocks, joined = _blocks(sizes.blocks, batch), _blocks(sizes.joined, batch)
        if not joined:
            return Chain(tuple(blocks), sizes.resident)
        return join([blocks] * sizes.branches, sizes.input * batch, joined, sizes.resident)

    def keeping(self, chain: Chain, saved: Sequence[int]) -> Plan:
        """The plan that saves the outputs of some blocks in each branch and recomputes what lies between them.

        Args:
            chain: of this file.
            saved: positions in a branch, from 1.

        Raises:
            InputError: they do not rise, or there is no such block.
        """
        row = sum(block.count for block in self.sizes.blocks)
        if list(saved) != sorted(set(saved)) or not all(1 <= position <= row for position in saved):
            shown = ",".join(map(str, saved))
            raise InputError(
                f"--plan {shown} does not name blocks in order: a branch has blocks 1 to {row}."
                if self.sizes.branches > 1
                else f"--plan {shown} does not name blocks in order: the chain has blocks 1 to {row}.",
                "Give rising positions of the blocks whose outputs are saved, such as 5,10,15.",
                "--plan",
            )
        items: list[int | Segment] = []
        for branch in range(self.sizes.branches):
            start = branch * row
            for stop in (*(branch * row + position for position in saved), (branch + 1) * row):
                items += _recomputed(chain, start, stop)
                start = stop
        return Plan((*items, *range(self.sizes.branches * row, len(chain))), GIVEN)


def _recomputed(chain: Chain, start: int, stop: int) -> list[int | Segment]:
    """Blocks as one segment, those saved that cannot be recomputed; so is the chain's last one."""
    items: list[int | Segment] = []
    segment: list[int] = []
    for position in range(start, stop):
        if chain.blocks[position].recomputable and position < len(chain) - 1:
            segment.append(position)
            continue
        items += [tuple(segment)] if segment else []
        items.append(position)
        segment = []
    return items + ([tuple(segment)] if segment else [])


def open_chain(path: str) -> DescribedChain:
    """A file that describes a chain.

    Raises:
        InputError: it is no YAML, or says something that no chain has.
    """
    data = parse_yaml(read_text(path), path).data
    try:
        described = ChainFile.model_validate(data)
    except InputError as error:  # of a size
        raise error.located(path) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{where} = {describe(first['input'])}: {first['msg']}.", "See docs/guides/recompute.md.", path
        ) from None
    sizes = described.chain
    row, joined = (sum(block.count for block in each) for each in (sizes.blocks, sizes.joined))
    if sizes.branches * row * row + joined * joined > MOST_BLOCKS * MOST_BLOCKS:
        branches = f" in each of {sizes.branches:,} branches" if sizes.branches > 1 else ""
        raise InputError(
            f"the chain has {row:,} blocks{branches} and {joined:,} joined ones, and the limit is "
            f"{MOST_BLOCKS} in a row, or branches whose squares come to as much.",
            "Describe several blocks as one, e.g. a layer in place of its parts.",
            path,
        )
    if sizes.branches > 1 and not sizes.joined:
        raise InputError(
            f"chain.branches = {sizes.branches}, but nothing joins them.", "List what follows under joined.", path
        )
    if not any(block.flops for block in (*sizes.blocks, *sizes.joined)):
        raise InputError(
            "no block has flops, which plans are compared by.", "Set the FLOPs of each block's forward.", path
        )
    return DescribedChain(path, described.name, sizes)


def read_chain(path: str) -> tuple[str, Chain]:
    """The name and the chain of a file.

    Raises:
        InputError: as `open_chain`.
    """
    described = open_chain(path)
    return described.name, described.chain()


def _blocks(described: list[BlockSizes], batch: int) -> list[Block]:
    return [
        simple_block(
            f"{block.name} {number + 1}" if block.count > 1 else block.name,
            block.input * batch,
            block.inside * batch,
            block.output * batch,
            int(block.flops * batch),
            block.left,
            temporary_bytes=block.temporary * batch,
            recomputable=block.recomputable,
        )
        for block in described
        for number in range(block.count)
    ]


def plan_chain(
    path: str,
    limit: int | None,
    gpu: str | None,
    strategy: str = "optimal",
    *,
    saved: Sequence[int] | None = None,
    maximize: bool = False,
) -> ChainPlanning:
    """The plan of a chain that a file describes.

    Args:
        path: of the file.
        limit: bytes that may be allocated; None: what the card has, less its context, divided by the most that
            recorded runs of one GPU reserved for each allocated byte.
        gpu: the card.
        strategy: "optimal", or a rule of `memcalc.planning.planner.STRATEGIES`.
        saved: positions, from 1, of the blocks of each branch whose outputs are saved: a plan to be evaluated.
        maximize: whether to raise the batch to the largest that fits.

    Raises:
        InputError: no budget, no chain, an unknown strategy, or a plan of other blocks.
        DoesNotFit: no plan, or not the given one, is small enough.
    """
    if limit is None and gpu is None:
        raise InputError("the memory limit is missing.", "Add --gpu GPU or --budget SIZE.")
    if strategy != "optimal" and strategy not in STRATEGIES:
        known = ", ".join(("optimal", *STRATEGIES))
        raise InputError(f"strategy = {strategy!r} does not apply to chains.", f"Use {known}.", "--strategy")
    described = open_chain(path)
    reserve = None if limit is not None else _reserve(find_card(gpu or ""))
    budget = limit if reserve is None else int(reserve.room_bytes / reserve.ratio)
    assert budget is not None

    def least(batch: int) -> Evaluation:
        chain = described.chain(batch)
        if saved is not None:
            return evaluate(chain, described.keeping(chain, saved))
        return evaluate(chain, (smallest if strategy == "optimal" else STRATEGIES[strategy])(chain))

    batch = described.sizes.batch
    most = _largest(least, budget) if maximize else None
    if most:
        batch = most
    chain = described.chain(batch)
    if saved is None and strategy == "optimal":
        found = optimal(chain, budget)
    else:
        plan = STRATEGIES[strategy](chain) if saved is None else described.keeping(chain, saved)
        evaluation = evaluate(chain, plan)
        found = Found(plan, evaluation, None) if evaluation.peak_bytes <= budget else None
    if found is None:
        raise _too_large(chain, budget, least(batch), strategy if saved is None else None)
    rules = tuple((rule, evaluate(chain, plan(chain))) for rule, plan in STRATEGIES.items())
    gain = None if most is None else _gain(described, found, budget, most)
    points = tuple(front(chain)) if saved is None else ()
    span = Span(chain, 0, len(chain))
    return ChainPlanning(described.name, batch, span, budget, reserve, found, rules, points, gain)


def _too_large(chain: Chain, budget: int, least: Evaluation, strategy: str | None) -> DoesNotFit:
    """What to say of a chain that does not fit; strategy None: of a plan that was given."""
    need = f"{format_bytes(least.peak_bytes)}, in {least.peak.block or least.peak.phase}"
    resident = f"{format_bytes(chain.resident)} are resident."
    if strategy is None:
        return DoesNotFit(f"The plan does not fit {format_bytes(budget)}. It needs {need}; {resident}")
    if strategy == "optimal":
        return DoesNotFit(f"No plan fits {format_bytes(budget)}. The smallest needs {need}; {resident}")
    return DoesNotFit(f"Strategy {strategy} does not fit {format_bytes(budget)}. Try --strategy optimal.")


def _largest(need: Callable[[int], Evaluation], budget: int) -> int:
    """The largest batch that fits, by doubling and bisection; 0: not even one sample."""
    low, high = 0, 1
    while need(high).peak_bytes <= budget:
        low, high = high, 2 * high
        if high > MOST_SAMPLES:
            raise InputError(
                "the largest batch has no bound: sizes do not grow with it.", "Give sizes of one sample.", "chain.batch"
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle).peak_bytes <= budget else (low, middle)
    return low


def _gain(described: DescribedChain, found: Found, budget: int, most: int) -> Gain:
    without = _largest(lambda batch: evaluate_all_kept(described.chain(batch)), budget)
    longer = slow_down(described.chain(most).flops, found.evaluation.again_flops)
    return gain_of((without, most), longer, replayed=False)


def _reserve(card: Card) -> Reserve:
    ratio, errors = reserve_ratio((ONE_GPU,))
    return Reserve(card.usable_bytes - card.context_bytes, ratio * (1 + errors.high), errors.runs, errors.kind)
