"""Chains that a YAML file describes: blocks by their sizes, alone or in parallel branches that are joined."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from memcalc.errors import DoesNotFit, InputError
from memcalc.files import read_bytes, read_text
from memcalc.planning.chain import Block, Chain, join, simple_block
from memcalc.planning.evaluation import Evaluation, evaluate
from memcalc.planning.planner import STRATEGIES
from memcalc.planning.strategies.optimal import Found, front, optimal
from memcalc.planning.strategies.smallest import smallest
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
    """Blocks in the order of forward; or one branch of several that read `input` and are joined."""

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
        configured: the chain.
        budget: bytes that may be allocated.
        reserve: what the budget rests on, where a GPU is named; None: it was given.
        found: the plan.
        rules: what the rules of thumb need and cost.
        front: plans from the smallest to the fastest.
    """

    name: str
    configured: Span
    budget: int
    reserve: Reserve | None
    found: Found
    rules: tuple[tuple[str, Evaluation], ...]
    front: tuple[Found, ...]


def describes_chain(path: str) -> bool:
    """Whether this is a YAML file with `chain:` in it."""
    if not path.endswith((".yaml", ".yml")):
        return False
    try:
        text = read_bytes(path).decode(errors="replace")
    except InputError:  # whoever reads it as a configuration says why
        return False
    return any(line.startswith("chain:") for line in text.splitlines())


def read_chain(path: str) -> tuple[str, Chain]:
    """The name and the chain of a file.

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
    blocks = _blocks(sizes.blocks)
    if sizes.branches > 1 and not sizes.joined:
        raise InputError(
            f"chain.branches = {sizes.branches}, but nothing joins them.", "List what follows under joined.", path
        )
    if not any(block.flops for block in (*sizes.blocks, *sizes.joined)):
        raise InputError(
            "no block has flops, which plans are compared by.", "Set the FLOPs of each block's forward.", path
        )
    if not sizes.joined:
        return described.name, Chain(tuple(blocks), sizes.resident)
    return described.name, join([blocks] * sizes.branches, sizes.input, _blocks(sizes.joined), sizes.resident)


def _blocks(described: list[BlockSizes]) -> list[Block]:
    return [
        simple_block(
            f"{block.name} {number + 1}" if block.count > 1 else block.name,
            block.input,
            block.inside,
            block.output,
            int(block.flops),
            block.left,
            temporary_bytes=block.temporary,
            recomputable=block.recomputable,
        )
        for block in described
        for number in range(block.count)
    ]


def plan_chain(path: str, limit: int | None, gpu: str | None, strategy: str = "optimal") -> ChainPlanning:
    """The plan of a chain that a file describes.

    Args:
        path: of the file.
        limit: bytes that may be allocated; None: what the card has, less its context, divided by the most that
            recorded runs of one GPU reserved for each allocated byte.
        gpu: the card.
        strategy: "optimal", or a rule of `memcalc.planning.planner.STRATEGIES`.

    Raises:
        InputError: no budget, no chain, or an unknown strategy.
        DoesNotFit: no plan is small enough.
    """
    if limit is None and gpu is None:
        raise InputError("the memory limit is missing.", "Add --gpu GPU or --budget SIZE.")
    if strategy != "optimal" and strategy not in STRATEGIES:
        known = ", ".join(("optimal", *STRATEGIES))
        raise InputError(f"strategy = {strategy!r} does not apply to chains.", f"Use {known}.", "--strategy")
    name, chain = read_chain(path)
    reserve = None if limit is not None else _reserve(find_card(gpu or ""))
    budget = limit if reserve is None else int(reserve.room_bytes / reserve.ratio)
    assert budget is not None
    if strategy == "optimal":
        found = optimal(chain, budget)
    else:
        plan = STRATEGIES[strategy](chain)
        evaluation = evaluate(chain, plan)
        found = Found(plan, evaluation, None) if evaluation.peak_bytes <= budget else None
    if found is None:
        least = evaluate(chain, smallest(chain))
        raise DoesNotFit(
            f"No plan fits {format_bytes(budget)}. The smallest needs {format_bytes(least.peak_bytes)}, in "
            f"{least.peak.block or least.peak.phase}; {format_bytes(chain.resident)} are resident."
            if strategy == "optimal"
            else f"Strategy {strategy} does not fit {format_bytes(budget)}. Try --strategy optimal."
        )
    rules = tuple((rule, evaluate(chain, plan(chain))) for rule, plan in STRATEGIES.items())
    return ChainPlanning(name, Span(chain, 0, len(chain)), budget, reserve, found, rules, tuple(front(chain)))


def _reserve(card: Card) -> Reserve:
    ratio, errors = reserve_ratio((ONE_GPU,))
    return Reserve(card.usable_bytes - card.context_bytes, ratio * (1 + errors.high), errors.runs, errors.kind)
