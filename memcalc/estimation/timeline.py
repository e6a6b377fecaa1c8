"""Forward, loss and backward of one stage, moment by moment: the highest moment of each, and what is alive in it.

Blocks follow one another: embedding, layers, head. A block's program (tape.py) gives its own highest moment; around
it stand what the blocks before it have saved and the gradients of the blocks behind it. Along layers that are alike
this sum is linear, so its highest value is at the first or the last of them; only where a plan names the layers to
recompute, it can lie in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from operator import itemgetter

from memcalc.estimation.blocks.catalogue import Gradients, Part, program
from memcalc.estimation.blocks.structure import structure_of
from memcalc.estimation.engines.buffers import Around
from memcalc.estimation.engines.zero3_gathering import gathered
from memcalc.estimation.engines.zero_reduction import first_layer
from memcalc.estimation.items import Item
from memcalc.estimation.moments import Block, Candidate, Highest, Holding, held, layer_name, others_of, place
from memcalc.estimation.program import Stream
from memcalc.estimation.sharding import stage_parameters
from memcalc.estimation.sized import sizer_of
from memcalc.estimation.stages import Kind, Stage, count_between, kinds_of, runs_of
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec

Counts = dict[tuple[int, int], int]  # (block, storage) -> how many are alive

# The moments of backward before its first matrix product, hence before cuBLAS has a workspace in autograd's thread.
BEFORE_FIRST_PRODUCT = ("head", "head: ", "head: nll_loss", "head: log_softmax")


class Timeline:
    """The moving part of one stage.

    Args:
        spec: the run.
        stage: the pipeline stage.
        values: symbols and their values.
        gradients: what happens to each parameter's gradient on arrival.
        around: the engine's buffers around a layer; with shares, a layer leaves only its share of gradients behind.
    """

    def __init__(self, spec: Spec, stage: Stage, values: dict[str, int], gradients: Gradients, around: Around) -> None:
        structure = structure_of(spec)
        self.spec = spec
        self.stage = stage
        self.values = values
        self.around = around
        self.delivers = spec.parallelism.engine == "deepspeed" and not gradients.kept  # each to a bucket, as it arrives
        self.blocks: list[Block] = []
        sizer = sizer_of(values)

        def add(name: str, part: Part, kind: Kind | None) -> None:
            detached = kind is not None and kind.detached
            written = structure._replace(detached=True) if detached else structure
            compiled = program(written, part, kind is not None and kind.recomputed, gradients)
            left = compiled.left
            if around.layer_share and not (part == "head" or self.delivers):
                left = compiled.left_without_gradients  # FSDP2 reduces the root, head and embedding, at the very end
            others = others_of(stage, name, compiled, kind, tables)
            self.blocks.append(Block(name, compiled, sizer.sized(compiled), kind, left, others))

        self.tables = tables = program(structure, "tables", False, gradients)
        if stage.has_embedding:
            add("embedding", "embedding", None)
        elif tables.storages:
            add("shared tables", "tables", None)
        kinds = self.kinds()
        alike = sum(not kind.detached for kind in kinds)
        for kind in kinds:
            add(layer_name(spec, kind, alike), "expert layer" if kind.experts else "dense layer", kind)
        if stage.has_head:
            add("head", "head", None)

    def kinds(self) -> list[Kind]:
        """The kinds of layers, in the order of their first."""
        return kinds_of(self.spec, self.stage)

    # -- the three phases --------------------------------------------------------------------------------------------

    def highest(self, stream: Stream, workspace: Item | None = None) -> Highest:
        """The highest moment of a phase; `workspace` is made by the first matrix product of backward.

        Of forward it is that of the last micro-batch in flight; of the loss, on a stage without a head, the end of
        forward.
        """
        return self._best(self.candidates(stream, workspace))

    def candidates(self, stream: Stream, workspace: Item | None = None) -> Iterator[Candidate]:
        """The moments of a phase that may be its highest, in order."""
        if stream == "backward":
            return self._backward_with(workspace)
        return self._forward_moments() if stream == "forward" else self._loss_moments()

    # -- moments -----------------------------------------------------------------------------------------------------

    def _forward_moments(self) -> Iterator[Candidate]:
        for index, block in enumerate(self.blocks):
            layer = self.stage.first if block.kind is None else block.kind.last
            if block.name == "head":
                layer = self.stage.stop
            engine = self.around.forward_head if block.name == "head" else ()
            if block.kind is not None:
                engine = self.around.forward_layer
                yield from self._arrivals(index, block)
                yield from self._widest(index, block)
            for position in self.highest_positions(block, "forward"):
                alive = block.program.alive("forward", position)
                # What the layers' Python names, beside what is saved, goes before the head is reached.
                gone = block.name == "head" and bool(block.program.packed)
                holdings = [*self._saved(index, layer, "loss" if gone else "forward"), (index, alive, 1)]
                where = place(block, block.program.forward, position)
                yield Candidate(holdings, (*((item, 1) for item in engine), *self._gathered(layer)), where)

    def _widest(self, index: int, block: Block) -> Iterator[Candidate]:
        """The layer in whose forward the engine has gathered most, if it is of this kind and not the last of all."""
        if not self.around.forward_widest or block.kind is None:
            return
        recomputes = self.spec.training.recompute == "full"
        found = gathered(stage_parameters(self.spec, self.stage), recomputes=recomputes)
        layer = self.stage.first + found.widest_forward
        if layer < self.stage.stop - 1 and count_between(self.spec, block.kind, layer, layer + 1):
            engine = (*((item, 1) for item in self.around.forward_widest), *self._gathered(layer))
            for position in self.highest_positions(block, "forward"):
                alive = block.program.alive("forward", position)
                where = place(block, block.program.forward, position)
                yield Candidate([*self._saved(index, layer, "forward"), (index, alive, 1)], engine, where)

    def _loss_moments(self) -> Iterator[Candidate]:
        if not self.stage.has_head:
            saved = self._saved(len(self.blocks), self.stage.stop, "loss")
            yield Candidate(saved, self._gathered(self.stage.stop), "end of forward")
            return
        head = len(self.blocks) - 1
        block = self.blocks[head]
        saved = self._saved(head, self.stage.stop, "loss")
        engine = (*((item, 1) for item in self.around.loss_and_head), *self._gathered(self.stage.stop))
        for position in self.highest_positions(block, "loss"):
            yield Candidate([*saved, (head, block.program.alive("loss", position), 1)], engine, "loss")

    def _backward_with(self, workspace: Item | None) -> Iterator[Candidate]:
        for moment in self._backward:
            if workspace is None or moment.where in BEFORE_FIRST_PRODUCT:
                yield moment
            else:
                yield moment._replace(engine=(*moment.engine, (workspace, 1)))

    def highest_positions(
        self, block: Block, stream: Stream, since: int = 0, among: frozenset[int] | None = None
    ) -> Iterable[int]:
        """Where in one of its streams a block is at its highest: at event `since` or later, or at one of some events.

        One position, where sizes are known; else there are as many as may be (memcalc/engine). The head's backward has
        a second one, if the first comes before its first matrix product: a lower one may stand beside a workspace.
        """
        events = block.program.stream(stream)
        if among is not None:
            return (block.sized.highest_among(stream, among),)
        position = block.sized.highest_since(stream, since)
        if stream == "backward" and place(block, events, position) in BEFORE_FIRST_PRODUCT:
            products = (at for at in range(1, len(events) + 1) if place(block, events, at) not in BEFORE_FIRST_PRODUCT)
            return position, block.sized.highest_since(stream, next(products))
        return (position,)

    def _arrivals(self, index: int, block: Block) -> Iterator[Candidate]:
        """The moments before a layer's forward, in which an engine copies its parameters out of what was gathered."""
        if not self.around.before_layer or block.kind is None:
            return
        given = tuple(event.storage for event in block.program.forward if event.label == "start")
        for layer in sorted({block.kind.first, block.kind.last}):
            first = layer == self.stage.first
            engine = self.around.before_first_layer if first else self.around.before_layer
            holdings = [*self._saved(index, layer, "forward"), (index, given, 1)]
            items = (*((item, 1) for item in engine), *self._gathered(layer))
            yield Candidate(holdings, items, f"{block.name}: parameters arrive")

    def _gathered(self, layer: int) -> tuple[tuple[Item, int], ...]:
        """The parameters that layers up to this one have kept from their forward on."""
        found = []
        for experts, item in self.around.layer_gathered.items():
            count = self._layers_of(experts, self.stage.first, min(layer + 1, self.stage.stop))
            if count:
                found.append((item, count))
        return tuple(found)

    def _layers_of(self, experts: bool, lo: int, hi: int) -> int:
        """How many layers in [lo, hi) are dense, or have experts."""
        alike = [block.kind for block in self.blocks if block.kind is not None and block.kind.experts is experts]
        return sum(count_between(self.spec, kind, lo, hi) for kind in alike) if hi > lo else 0

    @cached_property
    def _backward(self) -> tuple[Candidate, ...]:
        return tuple(self._backward_moments())

    def _backward_moments(self) -> Iterator[Candidate]:
        for index, block in enumerate(self.blocks):
            events = block.program.backward
            tops = list(self.highest_positions(block, "backward"))
            for layer in self._turning_points(block):
                holdings = self._saved(index, layer, "backward") + self._behind(index, layer)
                sent_for = self._before(block, layer)
                if sent_for:
                    given = block.program.alive("backward", 1)  # what it has saved, and the gradient that comes in
                    engine = self._engine_behind(block, layer, beside=(*self._around(layer, after=False), *sent_for))
                    yield Candidate([*holdings, (index, given, 1)], engine, f"{block.name}: parameters arrive")
                for position in tops:
                    alive = block.program.alive("backward", position)
                    engine = self._engine_behind(block, layer)
                    yield Candidate([*holdings, (index, alive, 1)], engine, place(block, events, position))
                if block.kind is not None and self.around.after_layer:
                    done = block.program.alive("backward", len(events) - 1)
                    engine = self._engine_behind(block, layer, after=True)
                    yield Candidate([*holdings, (index, done, 1)], engine, f"{block.name}: gradients leave")
            if block.kind is not None and self.around.on_gradient:
                yield from self._on_gradients(index, block)
            if block.name == "embedding":
                yield from self._after_embedding(index, block)
            if block.name == "head" and self.around.backward_head:
                yield from self._after_first_gradient(index, block)
            if block.name == "head" and self.around.second_of_head:
                yield from self._on_later_gradients(index, block)

    def _on_gradients(self, index: int, block: Block) -> Iterator[Candidate]:
        """When a layer's gradient has just been made, and the engine reduces others first: from some layer on."""
        full = first_layer(stage_parameters(self.spec, self.stage))
        for layer in self._turning_points(block, self.stage.stop if full is None else self.stage.first + full + 1):
            holdings = self._saved(index, layer, "backward") + self._behind(index, layer)
            engine = self._engine_behind(block, layer, beside=self.around.on_gradient)
            for position in self.highest_positions(block, "backward", among=block.program.gradients):
                made = block.program.alive("backward", position)
                where = place(block, block.program.backward, position)
                yield Candidate([*holdings, (index, made, 1)], engine, where)

    def _after_embedding(self, index: int, block: Block) -> Iterator[Candidate]:
        """When the table's gradient is complete, and when all gradients are, which the engine then reduces."""
        before, length = self.stage.first - 1, len(block.program.backward)
        holdings = self._saved(index, before, "backward") + self._behind(index, before)
        if self.around.gradient_of_embedding:
            # The last event is that the gradient is let go, a tied one as that which the head has left.
            arrived = block.program.alive("backward", length - 1)
            beside = (*self.around.backward_embedding, *self.around.gradient_of_embedding)
            engine = self._engine_behind(block, before, beside=beside)
            yield Candidate([*holdings, (index, arrived, 1)], engine, f"{block.name}: gradient arrives")
        if self.around.after_embedding:
            if self.delivers:  # a tied head's, too
                holdings = self._saved(index, before, "backward") + [
                    (later, self.blocks[later].program.left_without_gradients, count)
                    for later, _, count in self._behind(index, before)
                ]
            done = block.program.alive("backward", length)
            engine = self._engine_behind(block, before, after=True)
            yield Candidate([*holdings, (index, done, 1)], engine, f"{block.name}: gradients leave")

    def _on_later_gradients(self, index: int, block: Block) -> Iterator[Candidate]:
        """When a gradient of the head's other than the first has just been made."""
        later = block.program.gradients - {min(block.program.gradients, default=0)}
        if not later:
            return
        holdings = self._saved(index, self.stage.stop, "backward") + self._behind(index, self.stage.stop)
        beside = (*self.around.backward_head, *self.around.second_of_head, *self.around.loss_and_head)
        engine = (*((item, 1) for item in beside), *self._gathered(self.stage.stop))
        for position in self.highest_positions(block, "backward", among=later):
            made = block.program.alive("backward", position)
            yield Candidate([*holdings, (index, made, 1)], engine, place(block, block.program.backward, position))

    def _after_first_gradient(self, index: int, block: Block) -> Iterator[Candidate]:
        """The highest moment of the head's backward from its first parameter gradient on."""
        events = block.program.backward
        holdings = self._saved(index, self.stage.stop, "backward") + self._behind(index, self.stage.stop)
        beside = (*self.around.backward_head, *self.around.loss_and_head)
        engine = (*((item, 1) for item in beside), *self._gathered(self.stage.stop))
        since = min(block.program.gradients, default=len(events))
        for position in self.highest_positions(block, "backward", since):
            alive = block.program.alive("backward", position)
            yield Candidate([*holdings, (index, alive, 1)], engine, place(block, events, position))

    def _turning_points(self, block: Block, stop: int | None = None) -> tuple[int, ...]:
        """Where backward may be at its highest in a block; of layers, only of those before `stop`."""
        if block.opens:
            return (self.stage.first - 1,)
        if block.kind is None:
            return (self.stage.stop,)
        if stop is not None:
            alike = kinds_of(self.spec, self.stage._replace(stop=min(stop, self.stage.stop)))
            ends = [
                {kind.first, kind.last} for kind in alike if kind[:2] == block.kind[:2] and kind[5] == block.kind[5]
            ]
            return tuple(sorted(set[int]().union(*ends), reverse=True))
        points = {block.kind.first, block.kind.last}
        if block.kind.detached:
            return (block.kind.first,)
        if self.around == Around() and isinstance(self.spec.training.recompute, str):
            return tuple(sorted(points, reverse=True))
        # An engine may hold less around the very last layer than around the others, so these are asked for themselves.
        others = self.stage._replace(stop=self.stage.stop - 1)
        alike = [kind for kind in kinds_of(self.spec, others) if kind[:2] == block.kind[:2] and not kind.detached]
        points.update(kind.last for kind in alike)
        if self.stage.layers > 1:  # and more around the first one's neighbour than around the first one
            behind = kinds_of(self.spec, self.stage._replace(first=self.stage.first + 1))
            points.update(kind.first for kind in behind if kind[:2] == block.kind[:2] and not kind.detached)
        mixed = self.spec.model.moe is not None and self.spec.model.moe.mixed
        if alike and (mixed or not isinstance(self.spec.training.recompute, str)):
            points.update(self.highest_layers(alike[0], others))
        return tuple(sorted(points, reverse=True))

    def highest_layers(self, kind: Kind, stage: Stage) -> Iterable[int]:
        """The layer of a kind around which most is alive: a plan that names layers lets the sum rise and fall.

        One layer, as in `highest_positions`.
        """
        weights = {}
        for index, block in enumerate(self.blocks):
            if block.kind is not None:
                share = self.around.layer_share.get(block.kind.experts)
                left = self._bytes(index, block.left) + (share.block if share is not None else 0)
                weights[block.kind[:2]] = (self._bytes(index, block.program.kept), left)
        height = before = 0
        found: list[tuple[int, int]] = []
        for run in runs_of(self.spec, stage):
            saved, left = weights[run[:2]]
            height += before - left  # one layer further, one more has saved its tensors and one less left its gradients
            top = height + (run.count - 1) * (saved - left)
            if run[:2] == kind[:2]:
                found += [(height, run.first), (top, run.last)]
            height, before = top, saved
        return (max(found)[1],)

    def _saved(self, until: int, layer: int, phase: str) -> list[Holding]:
        """What the blocks before block `until` (layers: before `layer`) hold in a phase, plus other micro-batches."""
        holdings: list[Holding] = []
        for index, block in enumerate(self.blocks):
            if block.kind is not None:
                before = count_between(self.spec, block.kind, self.stage.first, min(layer, self.stage.stop))
            else:
                before = 1 if block.opens and until > index else 0
            if before:
                holdings.append((index, held(block.program, phase), before))
            holdings += [(index, storages, count) for storages, count in block.others]
        return holdings

    def _behind(self, index: int, layer: int) -> list[Holding]:
        """The gradients that the blocks behind (later layers, the head) have made, and what the step holds of them."""
        holdings: list[Holding] = []
        for later, block in enumerate(self.blocks):
            count = int(block.name == "head" and index != later)
            if block.kind is not None:
                count = count_between(self.spec, block.kind, max(layer + 1, self.stage.first), self.stage.stop)
            if count:
                holdings.append((later, block.left, count))
        return holdings

    def _before(self, block: Block, layer: int) -> tuple[Item, ...]:
        """What an engine holds as a layer's backward begins, beside what it does in it."""
        if block.kind is None:
            return ()
        return self.around.before_first_backward if layer == self.stage.first else self.around.before_backward

    def _around(self, layer: int, *, after: bool) -> tuple[Item, ...]:
        """The engine's buffers in (or right after) the backward of a layer; only one layer is both first and last."""
        around = self.around
        inside = (around.backward_layer, around.backward_last_layer, around.backward_first_layer)
        beyond = (around.after_layer, around.after_last_layer, around.after_first_layer)
        usual, last, first = beyond if after else inside
        if layer == self.stage.stop - 1:
            return tuple(item for item in last if item in first) if layer == self.stage.first else last
        return first if layer == self.stage.first else usual

    def _engine_behind(
        self, block: Block, layer: int, *, after: bool = False, beside: tuple[Item, ...] = ()
    ) -> tuple[tuple[Item, int], ...]:
        """The engine's buffers in a block's backward, and the shares of gradients that later layers have left."""
        buffers = beside
        if beside:
            pass
        elif block.name == "head":
            buffers = self.around.loss_and_head
        elif block.name == "embedding":
            buffers = self.around.after_embedding if after else self.around.backward_embedding
        elif block.kind is not None:
            buffers = self._around(layer, after=after)
        shares: dict[bool, int] = {}
        if self.around.layer_share:
            for other in self.blocks:
                if other.kind is not None:
                    later = count_between(self.spec, other.kind, max(layer + 1, self.stage.first), self.stage.stop)
                    shares[other.kind.experts] = shares.get(other.kind.experts, 0) + later
        shared = tuple((self.around.layer_share[experts], count) for experts, count in shares.items() if count)
        gathered = self._gathered(layer - 1 if after else layer)  # its own are let go before its gradients leave
        return (*((item, 1) for item in buffers), *shared, *gathered)

    def _best(self, moments: Iterable[Candidate]) -> Highest:
        total, best = max(((self._weight(moment), moment) for moment in moments), key=itemgetter(0))
        return Highest(total, *best)

    def _weight(self, moment: Candidate) -> int:
        blocks = sum([self._bytes(block, storages) * count for block, storages, count in moment.holdings])
        return blocks + sum([item.block * count for item, count in moment.engine])

    def _bytes(self, block: int, storages: tuple[int, ...]) -> int:
        return self.blocks[block].sized.bytes_of(storages)

    # -- rows --------------------------------------------------------------------------------------------------------

    def items(self, moments: Iterable[tuple[Highest, int]]) -> Iterator[Item]:
        """What is alive in some moments, each with the mask of its phases, as items."""
        masks: dict[tuple[int, int, int], int] = {}
        for moment, mask in moments:
            for item, count in moment.engine:
                yield item._replace(count=count, mask=mask)
            for (index, number), count in _counts(moment.holdings).items():
                key = (index, number, count)
                masks[key] = masks.get(key, 0) | mask
        for (index, number, count), mask in masks.items():
            block = self.blocks[index]
            each = block.sized.exact[number]
            if not each:
                continue
            component, name, dtype, formula, citation = block.program.labels[number]
            size = block.sizes[number]
            shape = block.sized.shapes[number] or (each // DTYPE_BYTES[dtype],)
            yield Item(component, block.name, name, shape, dtype, count, each, size, mask, formula, citation)


def _counts(holdings: list[Holding]) -> Counts:
    counts: Counts = {}
    for block, storages, count in holdings:
        for storage in storages:
            counts[block, storage] = counts.get((block, storage), 0) + count
    return counts
