"""Forward, loss and backward of a planned step as requests: the programs of its blocks, in the plan's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from memcalc.layout.local_parameters import LocalParameter
from memcalc.ledger.component import Component
from memcalc.programs.program import Activity, SharedTable, StorageEvent, StorageSize
from memcalc.sharding.engine import EMBEDDING, ROOT, TAIL, Engine, Gradient
from memcalc.simulation.block_steps import BlockSteps
from memcalc.simulation.engine_hooks import NO_CALLS, BlockFrame, Calls, EngineHooks
from memcalc.simulation.layer_loops import LayerLoop
from memcalc.simulation.stage_blocks import NO_HEAD, SizedBlock, StageBlocks
from memcalc.spec.recompute_plan import Segment, leaves
from memcalc.spec.scoring import scores_beside_logits
from memcalc.stream.requests import Requests, TensorLabel

NO_TABLE = SharedTable("")  # stays allocated through backward for all layers, although no single layer reads it


class ForwardBackward:
    """One step's forward, loss and backward.

    Args:
        requests: where they are recorded.
        parts: the blocks of the stage.
        loops: the layers in forward order, grouped by the recomputation plan.
        engine: the sharding engine, which runs hooks before and after its units.
        parameters: parameters of each unit, by the names of their gradients.
        workspace_bytes: cuBLAS workspace, allocated by the first matmul of each thread.
        threads: the threads that already have a workspace; the step adds its threads.
        splits_workspaces: see `BlockSteps`.
        inputs_only: see `BlockSteps`.
    """

    steps_type = BlockSteps

    def __init__(
        self,
        requests: Requests,
        parts: StageBlocks,
        loops: Sequence[LayerLoop],
        engine: Engine,
        parameters: Mapping[int, Mapping[str, LocalParameter]],
        workspace_bytes: int,
        threads: set[str],
        *,
        splits_workspaces: bool = True,
        inputs_only: bool = False,
    ) -> None:
        self.requests = requests
        self.parts = parts
        self.loops = loops
        self.plan: Segment = tuple(item for loop in loops for item in loop.items)
        self.engine = engine
        self.parameters = parameters
        self.gradients: list[int] = []  # storages of gradients that stay allocated
        self.blocks = parts.blocks
        self.workspace_bytes = workspace_bytes
        self.threads = threads
        self.splits_workspaces = splits_workspaces
        self.steps = self.steps_type(parts, splits_workspaces=splits_workspaces, inputs_only=inputs_only)
        self.hooks = EngineHooks(engine, self.steps, parameters)
        # What checkpoints of several layers keep until their first layer has unpacked its last tensor.
        self.arguments: dict[int, int] = {}
        self.openings: list[BlockFrame] = []
        self.layers: dict[int, BlockFrame] = {}
        self.head = BlockFrame(parts.head, {})
        self.named: BlockFrame | None = None  # the layer with further results that a variable still references
        # RoPE caches and masks that the embedding block allocates and layers read.
        self.shared: dict[SharedTable, int] = {}
        self.stays: set[int] = set()  # outputs that their own blocks' backward needs
        self.leaf = -1  # the embedding's output, where it is set to require a gradient
        self.of_graph: list[int] = []  # what the loss references through its graph when backward has ended
        self.output = -1  # of a pipeline stage without LM head
        self.received = -1  # the gradient of its output
        self.input_gradient = -1  # of a pipeline stage that has received its input
        # Layers that are the last in backward to read storages of the embedding block -> event count -> storages to
        # free.
        self.last_readers: dict[int, dict[int, list[tuple[BlockFrame, int]]]] = {}

    def forward(self, hidden: int = -1) -> None:
        """Run forward until the model returns its logits, or a pipeline stage without LM head its `output`.

        Args:
            hidden: storage of the input that another stage has sent; -1: the first block creates it.
        """
        self.openings, self.layers = [], {}
        self.engine.before_forward(ROOT)
        for number in self.parts.openings:
            self.openings.append(frame := BlockFrame(number, {}))
            if self.engine.wraps_embedding_and_head:
                self.engine.before_forward(EMBEDDING)
            made = self.run(frame, hidden)
            hidden = made if made >= 0 else hidden
            if self.blocks[number].program.output_is_leaf and self.plan:
                self.leaf = hidden
                self.requests.hold(hidden)  # its AccumulateGrad node references it
            if self.engine.wraps_embedding_and_head:
                self.engine.after_forward(EMBEDDING)
            storages = self.blocks[number].program.storages
            tables = ((storages[at].table, each) for at, each in frame.held.items())
            self.shared |= {table: each for table, each in tables if table is not None}
        for items, rounds in self.loops:
            with self.requests.repeat(rounds):
                for item in items:
                    hidden = self.forward_of(item, hidden, rounds=rounds)
        if self.parts.spec.training.implementation == "plain":
            self._let_go("names")  # memcalc/step/recompute.py, run_plan: the layers run in a separate function
        if not self.parts.stage.has_head:
            self.output = hidden
            self._let_go("names")
            self._take_over_name(None)
            self._end_of_forward()
            return
        if self.engine.wraps_embedding_and_head:
            self.engine.before_forward(TAIL)
        self.run(self.head, hidden)
        self._let_go("names")  # if the LM head is part of the loss
        self._take_over_name(None)
        if not self.engine.output_is_loss:
            self._end_of_forward()

    def _end_of_forward(self) -> None:
        if self.engine.wraps_embedding_and_head and self.parts.stage.has_head:
            self.engine.after_forward(TAIL)
        self.engine.after_forward(ROOT)

    def loss(self) -> None:
        """Run the loss until backward begins, outside the autocast region."""
        block = self.blocks[self.head.number]
        self.engine.before_loss()
        for event in block.program.loss:
            self._play(block, self.head, event)
        if self.engine.output_is_loss:
            self._end_of_forward()
        if not scores_beside_logits(self.parts.spec):
            self._let_go("region")

    def end_scoring(self) -> None:
        """Free the logits, if they were live while a reference scored the micro-batch."""
        self._let_go("region")

    def backward(self, gradient: int = -1) -> list[int]:
        """Run backward and return the storages of all gradients.

        Args:
            gradient: of the output, which another pipeline stage has sent; -1: the loss is computed here.
        """
        self.last_readers = self._last_readers()
        self.gradients, self.received = [], gradient
        if self.parts.stage.has_head:
            gradient = self.back(self.head, -1, self._arrivals())
        else:
            self.engine.before_backward(ROOT)
        if self.engine.wraps_embedding_and_head:
            self.gradients += self.engine.after_backward(TAIL, self._produced(self.head, TAIL))
        for items, rounds in reversed(self.loops):
            with self.requests.repeat(rounds):
                gradient = self.backward_of(items, gradient)
        if self.leaf >= 0:  # its AccumulateGrad node lives as long as the loss, and with it the accumulated gradient
            self.requests.hold(gradient)
            self.of_graph = [self.leaf, gradient]
            self.leaf = -1
        if self.engine.wraps_embedding_and_head:
            self.engine.before_backward(EMBEDDING)
        if self.parts.stage.has_embedding:
            for frame in reversed(self.openings):
                gradient = self.back(frame, gradient)
        self.input_gradient = gradient
        if self.engine.wraps_embedding_and_head:  # the root may have other embeddings
            own = set(self.parameters[EMBEDDING].values())
            produced = [each for frame in self.openings for each in self._produced(frame, EMBEDDING, ROOT)]
            self.gradients += self.engine.after_backward(
                EMBEDDING, [each for each in produced if each.parameter in own]
            )
            self.gradients += self.engine.after_backward(ROOT, [e for e in produced if e.parameter not in own])
            return self.gradients
        produced = [each for frame in (self.head, *self.openings) for each in self._produced(frame, ROOT)]
        self.gradients += self.engine.after_backward(ROOT, produced)
        return self.gradients

    def release(self, *, keeps_output: bool = False) -> list[int]:
        """Free tensors that the training script references until backward returns, such as the logits.

        Args:
            keeps_output: whether the script still references the model's output and the loss.

        Returns:
            The storages of the model's output and the loss, if kept; the caller drops them.
        """
        kept, self.of_graph = self.of_graph, []
        if keeps_output:
            held = self.blocks[self.head.number].program.held
            kept += [self.head.held.pop(at) for at in held if at in self.head.held]
        else:
            self.requests.drop(kept)
            kept = []
        for frame in self._frames():
            with self.requests.repeat(frame.rounds):
                self.requests.drop(frame.held.values())
            frame.held.clear()
        return kept

    def _produced(self, frame: BlockFrame, *units: int) -> list[Gradient]:
        """Return the gradients that a block's backward has produced, and remove them from its frame."""
        storages = self.blocks[frame.number].program.storages
        made = [at for at in frame.held if storages[at].component is Component.GRADIENTS]
        return self.hooks.gradients(frame, made, *units)

    # -- items of the plan ---------------------------------------------------------------------------------------------

    def forward_of(self, item: int | Segment, hidden: int, *, inside: bool = False, rounds: int = 1) -> int:
        """Run the forward of a layer or a checkpoint segment; return the storage of its output.

        Only the input of the segment's first layer stays live.

        Args:
            item: the layer or the segment.
            hidden: storage of its input.
            inside: whether it is a recomputation inside another segment.
            rounds: the number of loop rounds that the item stands for.
        """
        for index, layer in enumerate(leaves(item)):
            kept = isinstance(item, int)
            number = self.parts.block_of(layer, again=not kept, inside=inside and kept)
            frame = self.layers[layer] = BlockFrame(number, {}, layer, rounds)
            if not inside:
                self.engine.before_forward(layer)
            hidden = self.run(frame, hidden, hands=not inside, again=inside)
            if not inside:
                self.engine.after_forward(layer)
            if (
                not inside
            ):  # the model's loop references all results of this layer, and no longer those of the layer before
                self._take_over_name(frame)
            if index:
                self._drop(frame, *self.blocks[number].program.kept)
            if inside:  # the autocast region of a recomputation ends with it
                self._drop(frame, *self.blocks[number].program.names, *self.blocks[number].program.region)
        return hidden

    def backward_of(self, items: Segment, gradient: int) -> int:
        """Run the backward of the items in reverse; segments are recomputed first."""
        for item in reversed(items):
            if isinstance(item, int):
                gradient = self._backward_of_layer(item, gradient)
            elif len(item) == 1 and isinstance(item[0], int):  # its program has the recomputation
                gradient = self._backward_of_layer(item[0], gradient)
            else:
                gradient = self._again(item, gradient)
            self._forget_masks(item if isinstance(item, int) else next(leaves(item)))
        return gradient

    def _backward_of_layer(self, layer: int, gradient: int, calls: Calls = NO_CALLS) -> int:
        self.engine.before_backward(layer)
        readers = self.last_readers.get(layer, {})
        unread: dict[int, Callable[[], None]] = {
            **{position: partial(self._drop_tables, tables) for position, tables in readers.items()},
            **calls,
        }
        if gradient == self.received >= 0:
            unread.update(self._sum_apart(self.layers[layer]))
        if layer in self.arguments:
            number = self.layers[layer].number
            end = self.blocks[number].program.checkpoint_end
            end = end if end >= 0 else len(self.steps.of(number, "backward"))  # no gradient has reached its operators
            unread[end] = partial(self.requests.drop, (self.arguments.pop(layer),))
        gradient = self.back(self.layers[layer], gradient, unread)
        self._drop_tables(readers.get(len(self.steps.of(self.layers[layer].number, "backward")), ()))
        self.gradients += self.engine.after_backward(layer, self._produced(self.layers[layer], layer))
        return gradient

    def _sum_apart(self, frame: BlockFrame) -> Calls:
        """Allocate the first sum of gradients along the residual stream, which autograd usually computes in place.

        A gradient that another stage has sent stays in its buffer, so it is not overwritten. The first sum is where an
        operator's input gradient is freed by the operator itself. If the received gradient is gone before, as with
        parallel attention and MLP, it has been added to another one. Source: torch 2.13
        csrc/autograd/input_buffer.cpp, accumulate.
        """
        block, steps = self.blocks[frame.number], self.steps.of(frame.number, "backward")
        exact, size_of = block.sized.exact, block.program.size_of
        start = newest = steps[0][1]
        maker = steps[0][0].operator
        for position, (event, at, *_) in enumerate(steps):
            if event.operator.when is not Activity.RUN:
                continue
            if event.sign < 0 and at == start:
                break
            if event.sign > 0 and size_of(at) == size_of(start):
                newest, maker = at, event.operator
            elif event.sign < 0 and (at, event.operator) == (newest, maker):
                return {position: partial(self._replace, frame, start, exact[start])}
        return NO_CALLS

    def _replace(self, frame: BlockFrame, at: int, size: int) -> None:
        before, frame.held[at] = frame.held[at], self.requests.take(size, 0, self.steps.labels(frame.number)[at])
        self.requests.drop((before,))

    def _forget_masks(self, layer: int) -> None:
        """Free masks that no earlier layer reads."""
        unread = [index for index, first in self.parts.masks_until.items() if layer <= first]
        for frame in self.openings:
            self._drop(frame, *unread)

    def _again(self, items: Segment, gradient: int) -> int:
        first = self.layers[next(leaves(items))]
        given = first.held[self.blocks[first.number].program.entry]
        self.requests.hold(given)
        self._drop(first, *self.blocks[first.number].program.kept)
        last = items[-1]
        self.requests.hold(given)
        before = items[:-1] if isinstance(last, int) else items
        if isinstance(last, int):
            number = self.parts.block_of(last, again=True, inside=bool(before))
            frame = self.layers[last] = BlockFrame(number, {}, last)
            events = self.steps.of(number, "backward")
            begins = (at for at, step in enumerate(events) if step.event.operator.when is Activity.AGAIN)
            recompute = partial(self._recompute, before, given, frame)
            gradient = self._backward_of_layer(last, gradient, {next(begins, len(events)): recompute})
        else:
            self.requests.drop((self._recomputed(before, given),))
        if before and isinstance(before[0], int):
            self.arguments[before[0]] = given
            return self.backward_of(before, gradient)
        gradient = self.backward_of(before, gradient)
        self.requests.drop((given,))
        return gradient

    def _recomputed(self, items: Segment, hidden: int) -> int:
        for item in items:
            hidden = self.forward_of(item, hidden, inside=True)
        return hidden

    def _recompute(self, items: Segment, given: int, frame: BlockFrame) -> None:
        """Recompute the layers of a segment before its last one, which has just unpacked a tensor."""
        frame.held[self.blocks[frame.number].program.entry] = self._recomputed(items, given)

    # -- blocks --------------------------------------------------------------------------------------------------------

    def run(self, frame: BlockFrame, given: int, *, hands: bool = False, again: bool = False) -> int:
        """Run a block's forward, which takes over its input; return its output with one owner.

        Args:
            frame: the block.
            given: storage of its input.
            hands: whether its other results stay live, too.
            again: whether it is a recomputation during backward.
        """
        block = self.blocks[frame.number]
        program = block.program
        held, take, drop, labels = frame.held, self.requests.take, self.requests.drop, self.steps.labels(frame.number)
        output, steps = -1, self.steps.of(frame.number, "forward")
        hooks = self.hooks.calls(frame, again=again)
        for position, (event, at, size, gone) in enumerate(steps):
            if position in hooks:
                hooks[position]()
            operator = event.operator
            if size and ("forward" in self.threads or not operator.multiplies):
                held[at] = take(size, 0, labels[at])
            elif gone and at in held:
                drop((held.pop(at),))
            elif operator.when is Activity.START and event.storage == program.entry and not block.opens:
                frame.held[event.storage] = given
                self._name_input(given, program.size_of(at), labels[at])
            elif operator.when is Activity.START and (table := program.storages[event.storage].table) in self.shared:
                assert table is not None
                frame.held[event.storage] = self.shared[table]
                self.requests.hold(self.shared[table])
            elif operator.when is Activity.END:
                output = frame.held.pop(event.storage)
                if event.storage in program.names:
                    frame.held[event.storage] = output
                    self.requests.hold(output)
            elif not (hands and event.sign < 0 and event.storage in program.handed):
                if operator.in_head:
                    self._let_go("names")  # the model without its LM head has returned
                    self._take_over_name(None)
                self._play(block, frame, event)
                is_result = event.sign > 0 and operator.multiplies and event.storage == operator.output
                if is_result and "forward" not in self.threads:
                    self._workspace("forward")
        hooks.get(len(steps), _nothing)()
        return self._kept_output(frame) if output < 0 <= program.output else output

    def _name_input(self, given: int, size: StorageSize, label: TensorLabel) -> None:
        """Label a storage as input of the block that takes it over, unless it stays or has another dtype."""
        before = self.requests.labels[given]
        if given in self.stays:
            return
        if not isinstance(before, TensorLabel) or self.blocks[before.block].program.size_of(before.storage) == size:
            self.requests.relabel(given, label)

    def _kept_output(self, frame: BlockFrame) -> int:
        """Return a block's output, with an additional owner if the block's own backward needs it."""
        output = frame.held[self.blocks[frame.number].program.output]
        self.requests.hold(output)
        self.stays.add(output)
        return output

    def _take_over_name(self, frame: BlockFrame | None) -> None:
        before, self.named = self.named, frame
        if before is not None:
            self._drop(before, *self.blocks[before.number].program.handed)

    def back(self, frame: BlockFrame, gradient: int, interruptions: Calls = NO_CALLS) -> int:
        """Run a block's backward, which takes over its output's gradient; return the gradient of its input.

        `interruptions`: functions to call after a number of the block's events.
        """
        block = self.blocks[frame.number]
        held, take, drop, labels = frame.held, self.requests.take, self.requests.drop, self.steps.labels(frame.number)
        handed_on, steps = -1, self.steps.of(frame.number, "backward")
        tied_sum, sum_stream = block.program.tied_sum, self.engine.sum_stream
        summands = self._summands(frame)
        interruptions = self.hooks.calls(frame, interruptions, backward=True)
        for position, (event, at, size, gone) in enumerate(steps):
            if position in interruptions:
                interruptions[position]()
            if size and position and ("backward" in self.threads or not event.operator.multiplies):
                held[at] = take(size, sum_stream if at == tied_sum else 0, labels[at])
            elif gone and position and at in held:
                (self._drop_summand if at in summands else drop)((held.pop(at),))
            elif not position and gradient >= 0:  # absent for the loss, and for frozen embeddings
                frame.held[event.storage] = gradient
            elif event.operator.when is Activity.END and not block.opens:
                handed_on = frame.held.pop(event.storage)
            elif event.sign < 0 and event.storage in self.parts.masks_until and block.opens:
                self._drop(frame, event.storage)
            elif event.sign < 0 and event.storage not in frame.held:
                if block.program.storages[event.storage].component is not Component.GRADIENTS:
                    continue  # a shared storage, freed by its last reader
                self._drop_tied()
            elif event.sign < 0 and event.storage == block.program.tied_sum:
                self._take_over(frame, event.storage)
            else:
                self._play(block, frame, event)
                multiplies = event.operator.multiplies and event.operator.written in (-1, event.storage)
                if event.sign > 0 and "backward" not in self.threads and multiplies:
                    self._workspace("backward")
        interruptions.get(len(steps), _nothing)()
        return handed_on

    # -- hooks of the engine -------------------------------------------------------------------------------------------

    def _arrivals(self) -> Calls:
        """Return when the gradients of the model's output and of the logits arrive at their units."""
        logits = self.steps.output_gradient()
        output = 0 if self.engine.output_is_loss else logits
        if output == logits or not self.engine.head_is_unit:
            return {output: self._reach_model}
        if self.engine.wraps_embedding_and_head:
            return {output: partial(self._reach_model, head=False), logits: self._reach_head}
        return {logits: self._reach_model}  # the root has no other parameters than the LM head's unit

    def _reach_head(self) -> None:
        """Run the hooks of the LM head's own unit for the gradient of the logits."""
        self.engine.before_backward(TAIL)

    def _reach_model(self, *, head: bool = True) -> None:
        """Run the hooks for the gradient of the model's output, which backward has just produced.

        Args:
            head: whether it is also that of the LM head's unit.
        """
        if self.engine.scales_output_gradient:
            program, exact = self.blocks[self.head.number].program, self.blocks[self.head.number].sized.exact
            before = program.stream("backward")[: self.steps.output_gradient()]
            at = next(event.storage for event in reversed(before) if event.sign > 0 and event.storage in self.head.held)
            scaled = self.requests.take(exact[at], 0, self.steps.labels(self.head.number)[at])
            self.requests.drop((self.head.held[at],))
            self.head.held[at] = scaled
        self.engine.before_backward(ROOT)
        if head and self.engine.wraps_embedding_and_head:
            self._reach_head()

    # -- storages of blocks --------------------------------------------------------------------------------------------

    def _last_readers(self) -> dict[int, dict[int, list[tuple[BlockFrame, int]]]]:
        """Return, per layer, the shared storages that it is the last to read in backward, by event count.

        A recomputed layer keeps its arguments until its checkpoint is freed; another layer keeps what it saved for
        backward.
        """
        readers: dict[int, dict[int, list[tuple[BlockFrame, int]]]] = {}
        reentrant, model = self.parts.structure.saving.reentrant, self.parts.spec.model
        for frame, at, table in self._tables():
            recomputed = (next(leaves(item)) for item in self.plan if not isinstance(item, int))
            if reentrant and any(table.windows in (None, model.has_window(layer)) for layer in recomputed):
                continue  # see `StageBlocks.masks_until`
            for item in self.plan:
                layer = next(leaves(item))
                if not isinstance(item, int) and (len(item) > 1 or not isinstance(item[0], int)):
                    break  # several layers: until the end
                program = self.blocks[self.layers[layer].number].program
                is_given = table.windows in (None, model.has_window(layer))
                position = dict(program.reads).get(table.name, -1) if is_given else -1
                if not isinstance(item, int) and is_given:
                    position = program.checkpoint_end
                elif position >= 0:  # a checkpointed part of the layer references it too
                    position = max(position, program.checkpoint_end)
                if position >= 0:
                    readers.setdefault(layer, {}).setdefault(position, []).append((frame, at))
                    break
        return readers

    def _tables(self) -> Iterator[tuple[BlockFrame, int, SharedTable]]:
        """Yield the storages of the embedding block that stay until layers have run backward, with their tables."""
        for frame in self.openings:
            program = self.blocks[frame.number].program
            for at in program.held:
                if at in frame.held:
                    yield frame, at, program.storages[at].table or NO_TABLE

    def _drop_tables(self, tables: Sequence[tuple[BlockFrame, int]]) -> None:
        for frame, at in tables:
            self._drop(frame, at)

    @property
    def _tied(self) -> int:
        """Return the storage of the tied LM head's gradient, which the embedding's backward completes."""
        return -1 if self.head.number == NO_HEAD else self.blocks[self.head.number].program.tied_gradient

    def _take_over(self, frame: BlockFrame, total: int) -> None:
        """Replace the head's gradient of a tied weight by the sum of both gradients."""
        if self._tied in self.head.held:
            self._drop_tied()
            self.head.held[self._tied] = frame.held.pop(total)
            label = self.steps.labels(frame.number)[total]._replace(component=Component.GRADIENTS)
            self.requests.relabel(self.head.held[self._tied], label)
        else:
            self._drop(frame, total)

    def _summands(self, frame: BlockFrame) -> frozenset[int]:
        """Return the gradients in a block's program that autograd adds to another one on `Engine.sum_stream`."""
        program = self.blocks[frame.number].program
        if not self.engine.sum_stream or program.tied_sum < 0:
            return frozenset()
        named = enumerate(program.storages)
        return frozenset(at for at, storage in named if storage.component is Component.GRADIENTS)

    def _drop_summand(self, storages: Iterable[int]) -> None:
        """Free gradients of a tied weight, once autograd has added them up on `Engine.sum_stream`."""
        if self.engine.sum_stream:
            self.requests.drop_used(storages, self.engine.sum_stream)
        else:
            self.requests.drop(storages)

    def _drop_tied(self) -> None:
        """Free the head's gradient of a tied weight, which is added to the embedding's."""
        if self._tied in self.head.held:
            self._drop_summand((self.head.held.pop(self._tied),))

    def _play(self, block: SizedBlock, frame: BlockFrame, event: StorageEvent) -> None:
        if event.sign > 0:
            script = block.sized.scripts.get(event.storage) if self.splits_workspaces else None
            size = block.sized.exact[event.storage]
            label = self.steps.labels(frame.number)[event.storage]
            made = self.requests.take(size, 0, label) if script is None else self.requests.play(script, label)
            frame.held[event.storage] = made
        else:
            self._drop(frame, event.storage)

    def _workspace(self, thread: str) -> None:
        self.threads.add(thread)
        self.requests.take_once(self.workspace_bytes, Component.LIBRARY_WORKSPACE)

    def _let_go(self, what: str) -> None:
        for frame in self._frames():
            with self.requests.repeat(frame.rounds):
                self._drop(frame, *getattr(self.blocks[frame.number].program, what))

    def _drop(self, frame: BlockFrame, *storages: int) -> None:
        self.requests.drop(frame.held.pop(at) for at in storages if at in frame.held)

    def _frames(self) -> Iterator[BlockFrame]:
        yield from self.openings
        yield from self.layers.values()
        yield self.head


def _nothing() -> None:
    """Do nothing: there is no hook."""
