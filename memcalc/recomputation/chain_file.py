"""Chains described in a YAML file: blocks by their sizes, alone or in parallel branches that are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from memcalc.errors import DoesNotFit, InputError
from memcalc.files import read_bytes, read_text
from memcalc.recomputation.batch_gain import Gain, gain_of, slow_down
from memcalc.recomputation.chain import Chain, ChainBlock, join, simple_block
from memcalc.recomputation.evaluation import Evaluation, evaluate, evaluate_without_recomputation
from memcalc.recomputation.plan import Plan, Segment
from memcalc.recomputation.planner import STRATEGIES
from memcalc.recomputation.strategies.lowest_peak import smallest
from memcalc.recomputation.strategies.optimal import OptimalPlan, front, optimal
from memcalc.spec.fields import describe
from memcalc.spec.hardware.gpus import GpuSpec, find_gpu
from memcalc.spec.yaml_source import parse_yaml
from memcalc.units import format_bytes, largest_that_fits, parse_bytes
from memcalc.verdict.recorded_errors import reserve_ratio
from memcalc.verdict.run_types import ONE_GPU


def _size(given: Any) -> Any:
    return parse_bytes(given) if isinstance(given, str) else given


# A size larger than the memory of any computer, small enough that sums of many fit the planner's 64 bits.
Size = Annotated[int, BeforeValidator(_size), Field(ge=0, le=2**50)]
MOST_BLOCKS = 200  # in sequence: about 10 seconds, growing quadratically
GIVEN = "given"  # instead of a strategy: the user's own plan
MOST_SAMPLES = 2**40  # of a batch
MOST_FLOPS = 2**57  # per block; larger values could overflow 64 bits in sums


class _ChainReader(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BlockSizes(_ChainReader):
    """One block, or several identical ones; see `memcalc.recomputation.chain.simple_block`."""

    name: str = "block"  # of the block; numbered if there are several
    count: Annotated[int, Field(ge=1, le=10_000)] = 1  # number of identical blocks
    input: Size  # bytes of the input
    inside: Size = 0  # bytes saved for backward, other than input and output
    output: Size  # bytes of the output
    flops: Annotated[float, Field(ge=0, le=MOST_FLOPS)] = 0  # of one forward
    left: Size = 0  # bytes of its parameters' gradients
    temporary: Size = 0  # bytes of temporaries in forward and backward
    recomputable: bool = True  # whether it may be recomputed


class ChainSizes(_ChainReader):
    """Blocks in forward order; or one of several branches that read `input` and are joined.

    With `batch`, all sizes except `resident` and `left` are per sample, and so are FLOPs.
    """

    batch: Annotated[int, Field(ge=1, le=2**31)] = 1  # number of samples
    resident: Size = 0  # bytes allocated throughout
    blocks: Annotated[list[BlockSizes], Field(min_length=1)]  # of the chain, or of one branch
    branches: Annotated[int, Field(ge=1, le=10_000)] = 1  # number of identical branches
    input: Size = 0  # bytes of the input that all branches read
    joined: list[BlockSizes] = []  # blocks from the concatenation of the branches on


class ChainFile(_ChainReader):
    """The content of the file."""

    name: str = "chain"
    chain: ChainSizes


class PlannedChain(NamedTuple):
    """A chain with all blocks planned, with the fields of `memcalc.recomputation.config_chain.ConfigChain`."""

    chain: Chain
    first: int
    stop: int


class ChainBudget(NamedTuple):
    """The memory budget of a chain on a GPU, from recorded runs: a chain has no requests to replay."""

    usable_bytes: int  # usable memory of the GPU, minus its context
    ratio: float  # maximum ratio of reserved to allocated memory of recorded runs
    runs: int  # number of recorded runs
    run_type: str  # type of runs


class ChainPlanning(NamedTuple):
    """The result for a chain.

    Args:
        name: of the chain, from the file.
        batch: samples, if the file's sizes are per sample; else 1.
        configured: the chain.
        budget: bytes that may be allocated; None: a given plan is evaluated without a limit.
        reserve: the basis of the budget, if a GPU is given; None: the budget was given.
        plan: the plan.
        rules: needs and costs of the rules of thumb.
        front: plans from the smallest to the fastest; empty for a given plan.
        gain: the largest batches that fit; None: not requested.
    """

    name: str
    batch: int
    configured: PlannedChain
    budget: int | None
    reserve: ChainBudget | None
    plan: OptimalPlan
    rules: tuple[tuple[str, Evaluation], ...]
    front: tuple[OptimalPlan, ...]
    gain: Gain | None


def describes_chain(path: str) -> bool:
    """Return whether a path is a YAML file with a `chain:` key."""
    if not path.endswith((".yaml", ".yml")):
        return False
    try:
        text = read_bytes(path).decode(errors="replace")
    except InputError:  # the reader of configurations reports the error
        return False
    return any(line.startswith("chain:") for line in text.splitlines())


class DescribedChain(NamedTuple):
    """A chain file after parsing."""

    path: str  # of the file, for messages
    name: str  # of the chain
    sizes: ChainSizes  # of its blocks

    def chain(self, batch: int | None = None) -> Chain:
        """Return the chain with `batch` samples; None: the number in the file."""
        sizes = self.sizes
        batch = sizes.batch if batch is None else batch
        blocks, joined = _blocks(sizes.blocks, batch), _blocks(sizes.joined, batch)
        if not joined:
            return Chain(tuple(blocks), sizes.resident)
        return join([blocks] * sizes.branches, sizes.input * batch, joined, sizes.resident)

    def keeping(self, chain: Chain, saved: Sequence[int]) -> Plan:
        """Return the plan that saves the outputs of some blocks in each branch and recomputes the blocks between them.

        Args:
            chain: of this file.
            saved: positions in a branch, from 1.

        Raises:
            InputError: the positions do not increase, or do not exist.
        """
        row = sum(block.count for block in self.sizes.blocks)
        if list(saved) != sorted(set(saved)) or not all(1 <= position <= row for position in saved):
            shown = ",".join(map(str, saved))
            raise InputError(
                f"--plan {shown} does not name blocks in order: a branch has blocks 1 to {row}."
                if self.sizes.branches > 1
                else f"--plan {shown} does not name blocks in order: the chain has blocks 1 to {row}.",
                "Give the numbers of the blocks that save their outputs in ascending order, such as 5,10,15.",
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
    """Return blocks as one segment, except those that cannot be recomputed and the chain's last, which are saved."""
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
    """Read a file that describes a chain.

    Raises:
        InputError: the file is not YAML, or has invalid content.
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
            f"{MOST_BLOCKS} in a row, or branches with the same sum of squares.",
            "Merge several blocks into one, e.g. the parts of a layer.",
            path,
        )
    if sizes.branches > 1 and not sizes.joined:
        raise InputError(
            f"chain.branches = {sizes.branches}, but nothing joins them.",
            "List the blocks after the branches under joined.",
            path,
        )
    if not any(block.flops for block in (*sizes.blocks, *sizes.joined)):
        raise InputError(
            "no block has flops, and plans are compared by FLOPs.", "Set the FLOPs of each block's forward.", path
        )
    return DescribedChain(path, described.name, sizes)


def _blocks(described: list[BlockSizes], batch: int) -> list[ChainBlock]:
    return [
        simple_block(
            f"{block.name} {number + 1}" if block.count > 1 else block.name,
            block.input * batch,
            block.inside * batch,
            block.output * batch,
            ceil(block.flops * batch),
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
    """Plan recomputation for a chain from a file.

    Args:
        path: of the file.
        limit: bytes that may be allocated; None: the usable memory of the GPU minus its context, divided by the maximum
            ratio of reserved to allocated memory of recorded one-GPU runs.
        gpu: the GPU; None, and no limit: the given plan is evaluated, whatever it needs.
        strategy: "optimal", or a rule of `memcalc.recomputation.planner.STRATEGIES`.
        saved: positions, from 1, of the blocks of each branch that save their outputs: a given plan to evaluate.
        maximize: whether to increase the batch to the largest that fits.

    Raises:
        InputError: no budget, no chain, an unknown strategy, or a plan of other blocks.
        DoesNotFit: no plan, or not the given one, is small enough.
    """
    if limit is None and gpu is None and (saved is None or maximize):
        raise InputError("the memory limit is missing.", "Add --gpu GPU or --budget SIZE.")
    if strategy != "optimal" and strategy not in STRATEGIES:
        known = ", ".join(("optimal", *STRATEGIES))
        raise InputError(f"strategy = {strategy!r} does not apply to chains.", f"Use {known}.", "--strategy")
    described = open_chain(path)
    reserve = None if limit is not None or gpu is None else _reserve(find_gpu(gpu))
    budget = limit if reserve is None else int(reserve.usable_bytes / reserve.ratio)

    def least(batch: int) -> Evaluation:
        chain = described.chain(batch)
        if saved is not None:
            return evaluate(chain, described.keeping(chain, saved))
        return evaluate(chain, (smallest if strategy == "optimal" else STRATEGIES[strategy])(chain))

    batch = described.sizes.batch
    most = _largest(least, budget) if maximize and budget is not None else None
    if most:
        batch = most
    chain = described.chain(batch)
    found: OptimalPlan | None
    if saved is None and strategy == "optimal" and budget is not None:
        found = optimal(chain, budget)
    else:
        plan = STRATEGIES[strategy](chain) if saved is None else described.keeping(chain, saved)
        evaluation = evaluate(chain, plan)
        found = OptimalPlan(plan, evaluation, None) if budget is None or evaluation.peak_bytes <= budget else None
    if found is None:
        assert budget is not None
        raise _too_large(chain, budget, least(batch), strategy if saved is None else None)
    rules = tuple((rule, evaluate(chain, plan(chain))) for rule, plan in STRATEGIES.items())
    gain = None if most is None or budget is None else _gain(described, found, budget, most)
    points = tuple(front(chain)) if saved is None else ()
    span = PlannedChain(chain, 0, len(chain))
    return ChainPlanning(described.name, batch, span, budget, reserve, found, rules, points, gain)


def _too_large(chain: Chain, budget: int, least: Evaluation, strategy: str | None) -> DoesNotFit:
    """Return the error for a chain that does not fit; strategy None: for a given plan."""
    need = f"{format_bytes(least.peak_bytes)}, in {least.peak.block or least.peak.phase}"
    resident = f"{format_bytes(chain.resident)} are resident."
    if strategy is None:
        return DoesNotFit(f"The plan does not fit {format_bytes(budget)}. It needs {need}; {resident}")
    if strategy == "optimal":
        return DoesNotFit(f"No plan fits {format_bytes(budget)}. The smallest needs {need}; {resident}")
    return DoesNotFit(f"Strategy {strategy} does not fit {format_bytes(budget)}. Try --strategy optimal.")


def _largest(need: Callable[[int], Evaluation], budget: int) -> int:
    """Return the largest batch that fits; 0 if not even one sample fits."""
    found = largest_that_fits(lambda batch: need(batch).peak_bytes <= budget, MOST_SAMPLES)
    if found == MOST_SAMPLES:
        raise InputError(
            "the largest batch is unbounded: sizes do not grow with the batch.",
            "Set the sizes of one sample.",
            "chain.batch",
        )
    return found


def _gain(described: DescribedChain, found: OptimalPlan, budget: int, most: int) -> Gain:
    without = _largest(lambda batch: evaluate_without_recomputation(described.chain(batch)), budget)
    longer = slow_down(described.chain(most).flops, found.evaluation.recompute_flops)
    return gain_of((without, most), longer, replayed=False)


def _reserve(gpu: GpuSpec) -> ChainBudget:
    ratio, errors = reserve_ratio((ONE_GPU,))
    return ChainBudget(gpu.usable_bytes - gpu.context_bytes, ratio * (1 + errors.high), errors.runs, errors.run_type)
