"""The chain of a configuration, from the estimate's formulas: embedding, layers, LM head. Does not need torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate, planned_timeline
from memcalc.phase_peaks.recompute_timeline import RecomputeTimeline
from memcalc.programs.program import Activity, highest
from memcalc.recomputation.chain import Chain, ChainBlock
from memcalc.recomputation.flops import head_flops, layer_flops, product_flops
from memcalc.recomputation.plan import Segment
from memcalc.spec.recompute_plan import as_recompute
from memcalc.spec.spec import Spec

STEP = 2  # the steady state, with the optimizer state allocated


class ConfigChain(NamedTuple):
    """The chain of a configuration, and the positions of its layers.

    Args:
        spec: the configuration, without recomputation.
        chain: its blocks.
        first: the block of layer 0.
        stop: the block after the last layer.
    """

    spec: Spec
    chain: Chain
    first: int
    stop: int

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
    timeline, engine = planned_timeline(with_recompute(spec, "full", saved_operators) if saved_operators else spec)
    products = None if saved_operators is None else product_flops(spec)
    totals = estimate(spec).ledger.totals
    moving = {
        "forward": timeline.highest("forward").bytes,
        "loss": timeline.highest("loss").bytes,
        "backward": timeline.highest("backward").bytes,
    }
    resident = {phase: totals[f"{phase}_{STEP}"] - amount for phase, amount in moving.items()}
    base = min(resident.values())
    blocks: list[ChainBlock] = []
    aside: list[int] = []  # additional bytes at each block's forward: live tensors of earlier blocks
    until_forward = until_loss = 0
    head = len(timeline.blocks) - 1
    opening = [number for number, block in enumerate(timeline.blocks) if block.opens]
    layers = [timeline.block_of(layer, again=False) for layer in range(spec.model.num_layers)]
    ends = [*(_entry(timeline, number) for number in layers), _entry(timeline, head)]
    blocks += [_plain_block(timeline, number, 0, ends[0], 0) for number in opening]
    for layer, number in enumerate(layers):
        blocks.append(_layer_block(timeline, layer, number, ends[layer], ends[layer + 1], layer_flops(spec, layer)))
        if products is not None:
            blocks[-1] = _keeping(timeline, layer, blocks[-1], products)
    for number in (*opening, *layers):
        aside.append(until_forward + resident["forward"] - base)
        program, sizes = timeline.blocks[number].program, timeline.blocks[number].sizes
        kept = set(program.kept)
        until_forward += sum(sizes[storage] for storage in program.after_forward if storage not in kept)
        until_loss += sum(sizes[storage] for storage in program.saved if storage not in kept)
    aside.append(until_forward + resident["forward"] - base)
    last = _plain_block(timeline, head, ends[-1], 0, head_flops(spec))
    program, sizes = timeline.blocks[head].program, timeline.blocks[head].sizes
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


def _sum(timeline: RecomputeTimeline, number: int, storages: tuple[int, ...]) -> int:
    return sum(timeline.blocks[number].sizes[storage] for storage in storages)


def _entry(timeline: RecomputeTimeline, number: int) -> int:
    """Return the bytes of the hidden state that a layer, or the LM head, reads."""
    block = timeline.blocks[number]
    return block.sizes[block.program.entry]


def _plain_block(timeline: RecomputeTimeline, number: int, given: int, made: int, flops: int) -> ChainBlock:
    """Return the block of the embedding, shared tensors or LM head, which is never recomputed."""
    block = timeline.blocks[number]
    kept = _sum(timeline, number, block.program.kept)
    backward = kept + highest(block.program.backward, block.sizes).bytes
    return ChainBlock(
        block.name,
        given,
        kept - given,
        made,
        flops,
        _sum(timeline, number, block.left),
        highest(block.program.forward, block.sizes).bytes,
        highest(block.program.forward, block.sizes).bytes,
        backward,
        backward,
        backward,
        recomputable=False,
    )


def _layer_block(timeline: RecomputeTimeline, layer: int, number: int, given: int, made: int, flops: int) -> ChainBlock:
    block = timeline.blocks[number]
    rerun = timeline.blocks[timeline.inside[number]]
    alone = timeline.blocks[timeline.block_of(layer, again=True)]
    kept = _sum(timeline, number, block.program.kept)
    once = sum(alone.sizes[storage] for storage in alone.program.kept)
    return ChainBlock(
        f"layer {layer}",
        given,
        kept - given,
        made,
        flops,
        _sum(timeline, number, block.left),
        highest(block.program.forward, block.sizes).bytes,
        highest(alone.program.forward, alone.sizes).bytes,
        kept + highest(block.program.backward, block.sizes).bytes,
        kept + highest(rerun.program.backward, rerun.sizes).bytes,
        once + highest(alone.program.backward, alone.sizes).bytes,
    )


def _keeping(timeline: RecomputeTimeline, layer: int, block: ChainBlock, flops: dict[str, int]) -> ChainBlock:
    """Return a recomputed layer's block that saves some results: their bytes, and the FLOPs still recomputed."""
    program, sizes = (alone := timeline.blocks[timeline.block_of(layer, again=True)]).program, alone.sizes
    again = {event.operator.name for event in program.backward if event.operator.when is Activity.AGAIN}
    return block._replace(
        released_late_bytes=sum(sizes[storage] for storage in program.kept) - block.input_bytes,
        recompute_flops=sum(amount for name, amount in flops.items() if name in again),
    )
