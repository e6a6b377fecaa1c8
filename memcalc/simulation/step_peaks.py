"""The transient tensors of a step, from its requests: forward, loss and backward of one micro-batch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from memcalc.layout.local_parameters import LocalParameter, LocalParameters, stage_parameters
from memcalc.layout.parameters import layer_prefixes
from memcalc.layout.stages import Stage, layer_modules
from memcalc.programs.sized_program import ProgramSizer
from memcalc.sharding.engine import ROOT, by_unit
from memcalc.simulation.forward_backward import ForwardBackward, LayerLoop
from memcalc.simulation.simulated_run import arriving_gradients, engine_of, gradient_name, plan_of
from memcalc.simulation.stage_blocks import StageBlocks
from memcalc.spec.recompute_plan import Segment, leaves
from memcalc.spec.spec import Spec
from memcalc.states.optimizers.parameter_order import in_order
from memcalc.states.state_options import state_options
from memcalc.stream.requests import Requests

LONGEST_PERIOD = 12  # layers: of a pattern of layers that repeats
FEWEST_ROUNDS = 4  # of a pattern: first, last, and a loop of at least two


class RecordedStep:
    """The requests of the last micro-batch in flight on one chunk of a stage: forward, loss and backward.

    Args:
        spec: the run.
        chunk: the chunk.
        sizer: sizes of its blocks.
        exist: whether gradients of earlier micro-batches exist.
        loops: whether equal rounds of layers are one loop.
    """

    def __init__(self, spec: Spec, chunk: Stage, sizer: ProgramSizer, *, exist: bool, loops: bool = True) -> None:
        self.requests = Requests()
        options, plan = state_options(spec), plan_of(spec, chunk)
        keys = [layer_key(spec, item) for item in plan]
        played = tuple(loops_of(plan, keys)) if loops else (LayerLoop(plan),)
        walked = [layer for loop in played for item in loop.items for layer in leaves(item)]
        parameters = of_layers(stage_parameters(spec, chunk), spec, chunk, walked)
        ordered = tuple(in_order(parameters, options.update.family, layer_prefixes(spec.model, walked)))
        units = by_unit(ordered, walked, ends=options.wraps_embedding_and_head)
        engine = engine_of(self.requests, ordered, units, spec)
        self.parts = StageBlocks(spec, chunk, sizer, arriving_gradients(spec, engine, exist=exist), plan)
        names = {
            unit: {gradient_name(each, spec.training.implementation): each for each in found}
            for unit, found in units.items()
        }
        if spec.model.tie_word_embeddings and spec.parallelism.pipeline_parallel == 1:
            names[ROOT].setdefault("lm_head.weight", units[ROOT][0])
        walk = ForwardBackward(self.requests, self.parts, played, engine, names, 0, {"forward", "backward"})
        self._hold_in_flight(walk)
        self.requests.begin("forward")
        engine.prepare()
        engine.begin(have_gradients=exist, last=True)
        walk.forward(self._received(walk))
        self.requests.begin("loss")
        walk.loss()
        self.requests.begin("backward")
        walk.backward()

    def _received(self, walk: ForwardBackward) -> int:
        """Allocate the input of a stage without embedding; return its storage."""
        if self.parts.stage.has_embedding:
            return -1
        plan = self.parts.plan
        number = self.parts.block_of(self.parts.stage.first, again=not isinstance(plan[0], int)) if plan else self.parts.head
        block = self.parts.blocks[number]
        return self.requests.take(block.sized.exact[block.program.entry], 0, walk.labels_of(number)[block.program.entry])

    def _hold_in_flight(self, walk: ForwardBackward) -> None:
        for number, storages, count in self.parts.in_flight():
            with self.requests.repeat(count):
                for at in storages if count else ():
                    self.requests.take(self.parts.blocks[number].sized.exact[at], 0, walk.labels_of(number)[at])


def loops_of(plan: Segment, keys: Sequence[Hashable]) -> Iterator[LayerLoop]:
    """Yield the items of a plan, with equal rounds in the middle of a pattern that repeats as one loop.

    The first and the last round of a pattern stay apart: an engine prefetches for the next round, and frees what the
    round before has left.

    Args:
        plan: the plan.
        keys: of its items; equal for items that make the same requests.
    """
    at = 0
    while at < len(plan):
        saved, period, rounds = max(_patterns(keys, at))
        if saved <= 0:
            yield LayerLoop(plan[at : at + 1])
            at += 1
            continue
        yield LayerLoop(plan[at : at + period])
        yield LayerLoop(plan[at + period : at + 2 * period], rounds - 2)
        at += period * (rounds - 1)
        yield LayerLoop(plan[at : at + period])
        at += period


def _patterns(keys: Sequence[Hashable], at: int) -> Iterator[tuple[int, int, int]]:
    """Yield for each period how many items a loop from a position on saves, the period, and its rounds."""
    for period in range(1, LONGEST_PERIOD + 1):
        end = at + period
        while end < len(keys) and keys[end] == keys[end - period]:
            end += 1
        rounds = (end - at) // period
        yield period * (rounds - FEWEST_ROUNDS + 1), period, rounds


def layer_key(spec: Spec, item: int | Segment) -> Hashable:
    """Return a key that items of a plan with the same requests share."""
    return layer_modules(spec, item) if isinstance(item, int) else tuple(layer_key(spec, inner) for inner in item)


def of_layers(parameters: LocalParameters, spec: Spec, stage: Stage, layers: Sequence[int]) -> LocalParameters:
    """Return a stage's parameters with only some of its layers."""
    whole, some = (layer_prefixes(spec.model, each) for each in (range(stage.first, stage.stop), layers))

    def share(parameter: LocalParameter) -> LocalParameter:
        if parameter.where != "layer":
            return parameter
        prefix = parameter.module.partition("*")[0]
        kept = some.count(prefix) if whole else len(layers)
        of = whole.count(prefix) if whole else stage.stop - stage.first
        return parameter._replace(count=parameter.count * kept // of)

    return LocalParameters(map(share, parameters))
