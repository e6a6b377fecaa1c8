"""The chain of a configuration, from the estimate's formulas: embedding, layers, LM head, and FLOPs. Needs no torch."""

from __future__ import annotations

from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.layout.parameters import parameter_table, prefix_of
from memcalc.layout.stages import stages_of
from memcalc.layout.weight_layout import weight_layout
from memcalc.programs.program import Activity, highest
from memcalc.programs.sized_program import run_sizer
from memcalc.recomputation.chain import Chain, ChainBlock
from memcalc.recomputation.plan import Segment
from memcalc.sharding.engines import takes_gradients_over
from memcalc.simulation.stage_blocks import StageBlocks, module_of
from memcalc.spec.matmuls import layer_matmuls
from memcalc.spec.model import ATTENTION
from memcalc.spec.model_families.transformers_fallback import reject_without_formulas
from memcalc.spec.recompute_plan import as_recompute, items_of, leaves
from memcalc.spec.spec import Spec
from memcalc.states.gradient_policy import gradient_policy
from memcalc.states.recipe_copies import gradients_exist
from memcalc.states.state_options import state_options

STEP = 2  # the steady state, with the optimizer state allocated


class ConfigChain(NamedTuple):
    """The chain of a configuration, and the positions of its layers."""

    spec: Spec  # the configuration, without recomputation
    chain: Chain  # its blocks
    first: int  # the block of layer 0
    stop: int  # the block after the last layer

    def recompute(self, items: Segment) -> list[Any] | str:
        """Return a plan in the syntax of `training.recompute`."""
        return as_recompute(items, self.first, self.stop)


def with_recompute(spec: Spec, recompute: list[Any] | str, saved_operators: tuple[str, ...] = ()) -> Spec:
    """Return the same run with another plan.

    Args:
        spec: the run.
        recompute: as `training.recompute`.
        saved_operators: operators with results that recomputed layers save, as `training.recompute_keep`.

    Raises:
        InputError: the plan is invalid.
    """
    from memcalc.importers.loading import load

    raw = spec.model_dump()
    raw["training"] |= {"recompute": recompute, "recompute_keep": saved_operators}
    return load(raw, (), gpu=None).with_origin(spec.origin)


def chain_of(spec: Spec, saved_operators: tuple[str, ...] | None = None) -> ConfigChain:
    """Return the chain of a run.

    Args:
        spec: the run; its own plan is ignored.
        saved_operators: operators with results that recomputed layers save; each layer is then one segment, with FLOPs
            per operator. None: plan whole layers only.

    Raises:
        InputError: the model is split into pipeline stages, or the implementation is not modelled.
    """
    if spec.parallelism.pipeline_parallel > 1:
        raise InputError(
            f"pipeline_parallel = {spec.parallelism.pipeline_parallel}, but plans are for one stage only.",
            "Set pipeline_parallel: 1, and num_layers to the layers of a stage.",
            "parallelism.pipeline_parallel",
        )
    spec = with_recompute(spec, "none")
    parts, engine = _blocks(with_recompute(spec, "full", saved_operators) if saved_operators else spec)
    products = None if saved_operators is None else product_flops(spec)
    totals = estimate(spec).ledger.totals
    moving = _passes(parts)
    resident = {phase: totals[f"{phase}_{STEP}"] - amount for phase, amount in moving.items()}
    base = min(resident.values())
    blocks: list[ChainBlock] = []
    aside: list[int] = []  # additional bytes at each block's forward: live tensors of earlier blocks
    until_forward = until_loss = 0
    head, opening = parts.head, parts.openings
    layers = [parts.block_of(layer) for layer in range(spec.model.num_layers)]
    ends = [*(_entry(parts, number) for number in layers), _entry(parts, head)]
    blocks += [_plain_block(parts, number, 0, ends[0], 0) for number in opening]
    for layer, number in enumerate(layers):
        blocks.append(_layer_block(parts, layer, number, ends[layer], ends[layer + 1], layer_flops(spec, layer)))
        if products is not None:
            blocks[-1] = _keeping(parts, layer, blocks[-1], products)
    for number in (*opening, *layers):
        aside.append(until_forward + resident["forward"] - base)
        program, sizes = parts.blocks[number].program, parts.blocks[number].sizes
        kept = set(program.kept)
        until_forward += sum(sizes[storage] for storage in program.after_forward if storage not in kept)
        until_loss += sum(sizes[storage] for storage in program.saved if storage not in kept)
    aside.append(until_forward + resident["forward"] - base)
    last = _plain_block(parts, head, ends[-1], 0, head_flops(spec))
    program, sizes = parts.blocks[head].program, parts.blocks[head].sizes
    loss = sum(sizes[storage] for storage in program.after_forward) + highest(program.loss, sizes).bytes
    loss += until_loss - until_forward + resident["loss"] - resident["forward"]
    blocks.append(last._replace(forward_top=max(last.forward_top, loss)))
    others = {phase: amount for phase, amount in totals.items() if phase.rpartition("_")[0] not in moving}
    elsewhere = max(others, key=others.__getitem__)
    chain = Chain(
        tuple(blocks),
        base,
        tuple(aside),
        (resident["backward"] - base,) * len(blocks),
        elsewhere=others[elsewhere],
        elsewhere_name=elsewhere,
        longest=None if saved_operators is None and not engine else 1,  # engines gather and reduce layer by layer
    )
    return ConfigChain(spec, chain, len(opening), len(opening) + len(layers))


def _blocks(spec: Spec) -> tuple[StageBlocks, bool]:
    """Return the blocks of one steady step, and whether an engine takes gradients over unit by unit.

    Raises:
        InputError: the family, or this implementation of it, is not modelled.
    """
    reject_without_formulas(spec)
    options, stage = state_options(spec), stages_of(spec)[0]
    sharded = takes_gradients_over(options)
    gradients = gradient_policy(spec, exist=gradients_exist(options, STEP), sharded=sharded)
    plan = items_of((), spec.model.num_layers)  # every layer is kept
    return StageBlocks(spec, stage, run_sizer(spec, spec.gpu), gradients, plan), sharded


def _passes(parts: StageBlocks) -> dict[str, int]:
    """Return the transient bytes at the peak of each pass without recomputation, and without an engine's buffers."""
    layers = [parts.block_of(layer) for layer in leaves(parts.plan)]
    numbers = (*parts.openings, *layers, parts.head)
    blocks = [parts.blocks[number] for number in numbers]
    returned, saved, kept = (
        [0, *accumulate(_sum(parts, number, storages_of(parts.blocks[number].program)) for number in numbers)]
        for storages_of in (attrgetter("after_forward"), attrgetter("saved"), attrgetter("kept"))
    )
    forward = max(
        before + highest(each.program.forward, each.sizes).bytes for before, each in zip(returned, blocks, strict=False)
    )
    head = blocks[-1]
    loss = saved[-2] + returned[-1] - returned[-2] + highest(head.program.loss, head.sizes).bytes
    left, backward = 0, 0
    for number, until in zip(reversed(numbers), reversed(kept), strict=False):
        block = parts.blocks[number]
        backward = max(backward, until + left + highest(block.program.backward, block.sizes).bytes)
        left += _left(parts, number)
    return {"forward": forward, "loss": loss, "backward": backward}


def _left(parts: StageBlocks, number: int) -> int:
    """Return the bytes that a block's backward leaves allocated: not the gradients of a unit that FSDP shards."""
    block, options = parts.blocks[number], state_options(parts.spec)
    is_unit = block.part != "head" or options.fsdp.wraps_embedding_and_head
    if options.engine in ("fsdp1", "fsdp2") and options.data_parallel > 1 and is_unit:
        return block.sized.bytes_of(block.program.left_without_gradients)
    return block.sized.bytes_of(block.program.left)


def _sum(parts: StageBlocks, number: int, storages: tuple[int, ...]) -> int:
    return sum(parts.blocks[number].sizes[storage] for storage in storages)


def _entry(parts: StageBlocks, number: int) -> int:
    """Return the bytes of the hidden state that a layer, or the LM head, reads."""
    block = parts.blocks[number]
    return block.sizes[block.program.entry]


def _plain_block(parts: StageBlocks, number: int, given: int, made: int, flops: int) -> ChainBlock:
    """Return the block of the embedding, shared tensors or LM head, which is never recomputed."""
    block = parts.blocks[number]
    kept = _sum(parts, number, block.program.kept)
    backward = kept + highest(block.program.backward, block.sizes).bytes
    return ChainBlock(
        module_of(parts.spec, parts.stage, block),
        given,
        kept - given,
        made,
        flops,
        _left(parts, number),
        highest(block.program.forward, block.sizes).bytes,
        highest(block.program.forward, block.sizes).bytes,
        backward,
        backward,
        backward,
        recomputable=False,
    )


def _layer_block(parts: StageBlocks, layer: int, number: int, given: int, made: int, flops: int) -> ChainBlock:
    block = parts.blocks[number]
    rerun = parts.blocks[parts.block_of(layer, inside=True)]
    alone = parts.blocks[parts.block_of(layer, again=True)]
    kept = _sum(parts, number, block.program.kept)
    once = sum(alone.sizes[storage] for storage in alone.program.kept)
    return ChainBlock(
        f"layer {layer}",
        given,
        kept - given,
        made,
        flops,
        _left(parts, number),
        highest(block.program.forward, block.sizes).bytes,
        highest(alone.program.forward, alone.sizes).bytes,
        kept + highest(block.program.backward, block.sizes).bytes,
        kept + highest(rerun.program.backward, rerun.sizes).bytes,
        once + highest(alone.program.backward, alone.sizes).bytes,
    )


def _keeping(parts: StageBlocks, layer: int, block: ChainBlock, flops: dict[str, int]) -> ChainBlock:
    """Return a recomputed layer's block that saves some results: their bytes, and the FLOPs still recomputed."""
    program, sizes = (alone := parts.blocks[parts.block_of(layer, again=True)]).program, alone.sizes
    again = {event.operator.name for event in program.backward if event.operator.when is Activity.AGAIN}
    return block._replace(
        released_late_bytes=sum(sizes[storage] for storage in program.kept) - block.input_bytes,
        recompute_flops=sum(amount for name, amount in flops.items() if name in again),
    )


def layer_flops(spec: Spec, layer: int) -> int:
    """Return the FLOPs of one rank's forward of one layer, for one micro-batch."""
    model, parallelism = spec.model, spec.parallelism
    tokens = spec.training.micro_batch_size * spec.training.sequence_length
    weights = 0
    for row in parameter_table(model):
        if (
            row.part != "layer"
            or len(row.shape) < 2
            or not row.module.startswith(("layers.*", prefix_of(model, layer)))
        ):
            continue
        if ".experts." in row.module and model.moe is not None:  # a token is routed to k of E
            weights += row.elements * model.moe.num_experts_per_token // model.moe.num_experts
        else:
            weights += row.elements
    products = (
        2  # multiply and add
        * tokens
        * weights
    )
    attention = (
        2  # attention scores, and the weighted sum of values
        * 2  # multiply and add
        * tokens
        * spec.training.sequence_length  # all pairs: kernels that skip the masked half compute less
        * (model.query_size if model.mixer(layer) in ("", ATTENTION) else 0)
    )
    return (products + attention) // (parallelism.tensor_parallel * parallelism.context_parallel)


def head_flops(spec: Spec) -> int:
    """Return the FLOPs of one rank's forward of the LM head."""
    tokens = spec.training.micro_batch_size * spec.training.sequence_length
    whole = 2 * tokens * spec.model.embedding_size * spec.model.head_rows
    return whole // (spec.parallelism.tensor_parallel * spec.parallelism.context_parallel)


def product_flops(spec: Spec) -> dict[str, int]:
    """Return the FLOPs of one rank's forward of one plain layer by operator; they sum to `layer_flops`."""
    model, parallelism, training = spec.model, spec.parallelism, spec.training
    tokens = training.micro_batch_size * training.sequence_length
    ranks = parallelism.tensor_parallel * parallelism.context_parallel
    weights = {
        row.module.removeprefix("layers.*."): row.elements
        for row in parameter_table(weight_layout(model, "plain"))
        if row.part == "layer" and len(row.shape) == 2
    }
    if model.moe is not None:
        visited = model.moe.num_experts_per_token * model.hidden_size * model.moe.expert_intermediate_size
        weights |= dict.fromkeys(("mlp.experts.gate", "mlp.experts.up", "mlp.experts.down"), visited)
    attention = 2 * 2 * tokens * training.sequence_length * model.query_size  # as in `layer_flops`
    halves = {"scores": attention // 2, "attention output": attention // 2, "attention": attention}
    return {
        name: (halves[name] if name in halves else 2 * tokens * weights[name]) // ranks
        for name in layer_matmuls(model, training)
    }
