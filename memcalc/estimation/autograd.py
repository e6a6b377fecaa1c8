"""The autograd engine's bookkeeping, on a tape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from memcalc.estimation.program import END, FETCH, START, Event, Operator, When
from memcalc.estimation.saving import SOURCE
from memcalc.estimation.tape import CAST, IN_PLACE, REDUCED, SAME, SUMMED, VIEW, Node, Segment, Tape, Tensor
from memcalc.ledger.component import Component


class Backward:
    """The autograd engine's bookkeeping: operators in reverse, saved tensors dropped once used, gradients summed.

    Source: torch 2.13 torch/csrc/autograd/engine.cpp (evaluate_function) and input_buffer.cpp (accumulate):
    an operator's saved tensors and incoming gradient are let go after its outputs exist; a second gradient of a tensor
    is added into the first in place if nothing else refers to it and it is neither a view nor a tensor subclass's, else
    into a third one.
    """

    def __init__(
        self,
        tape: Tape,
        kept: set[int],
        keeps_gradients: bool,
        main_gradient_dtype: str | None,
        *,
        runs_again: bool = False,
    ) -> None:
        self.tape = tape
        self.runs_again = runs_again
        self.keeps_gradients = keeps_gradients
        self.main_gradient_dtype = main_gradient_dtype
        self.events: list[Event] = []
        self.references: dict[int, int] = {}
        self.pending: dict[Tensor, int] = {}
        self.stand_ins: dict[int, int] = {}
        self.untouched: dict[Segment, list[int]] = {}  # kept results that a recomputation did not come to
        self.views: set[int] = set()  # gradients that are not summed in place
        self.operator: Operator = START  # at work; of what comes from behind the block none
        self.ends_checkpoint: Segment | None = None  # the one that goes with the operator at work
        self.checkpoint_end = -1  # how many events there are until the first checkpoint has gone
        self.reads: dict[str, int] = {}  # tables of the model, and when the first of its readers has run backward
        self.inside = {p: segment for segment in tape.segments for p in range(segment.start, segment.stop)}
        for index in kept:
            self.references[index] = 0
        for position, node in enumerate(tape.nodes):
            if position not in self.inside:
                self.hold(node.saved)
        for segment in tape.segments:
            self.hold((*segment.on_device, *segment.kept))
        self.hold(tape.held)

    def hold(self, storages: Iterable[int]) -> None:
        """One more reference to each of some storages."""
        for index in storages:
            self.references[index] = self.references.get(index, 0) + 1

    def run(self, output: Tensor | None) -> list[Event]:
        """The stream of backward, from the gradient of the output (or of the loss) to that of the block's input."""
        last = output if output is not None else self.tape.nodes[-1].outputs[0]
        if last.grad:
            self.pending[last] = self.gradient_of(last)
        if output is None:
            self.hold([self.pending[last]])  # the caller of backward() keeps the loss's own gradient until it returns
        if self.tape.entry is None:
            self.let_go(self.tape.held)  # the first block: no later one reads the shared tables any more
        recomputed: set[Segment] = set()
        nodes = self.tape.nodes
        first_saver = {
            segment: next((p for p in range(segment.start, segment.stop) if nodes[p].unpacks), segment.start)
            for segment in self.tape.segments
        }
        for position in range(len(self.tape.nodes) - 1, -1, -1):
            segment = self.inside.get(position)
            node = self.tape.nodes[position]
            if segment is not None and segment not in recomputed and self.unpacks(node):
                self.run_again(segment)
                recomputed.add(segment)
            self.ends_checkpoint = segment if segment is not None and position == first_saver[segment] else None
            self.operator = self.tape.operator(position)
            self.step(node, takes=self.runs_again or segment is not None)
            if self.ends_checkpoint is not None:  # no gradient has come to it
                self.end_checkpoint()
        if self.tape.arrives_summed is not None:
            # The tied head's gradient, which its block counts, is now complete.
            self.references[self.tape.arrives_summed] = 1
            self.parameter_arrived(self.tape.arrives_summed)
        if self.tape.entry is not None and self.tape.entry in self.pending:
            self.operator = END
            self.release(self.pending[self.tape.entry])  # it is the incoming gradient of the block before
        return self.events

    def end_checkpoint(self) -> None:
        """A checkpoint goes, with the arguments that it holds, once the last tensor that it gives was unpacked."""
        segment, self.ends_checkpoint = self.ends_checkpoint, None
        assert segment is not None
        self.let_go((*segment.on_device, *self.untouched.pop(segment, segment.kept)))
        self.checkpoint_end = len(self.events)

    def unpacks(self, node: Node) -> bool:
        """Whether an operator's backward runs now, and asks for a saved tensor."""
        return node.unpacks and any(tensor in self.pending for tensor in node.outputs)

    def run_again(self, segment: Segment) -> None:
        """Recompute a segment up to its last saved tensor (torch/utils/checkpoint.py stops early).

        A tensor that something outside keeps alive already is made a second time; a result that the segment has kept
        is taken out of its store, which holds it no longer.
        """
        nodes = self.tape.nodes[segment.start : segment.stop]
        lasting = {index for node in nodes for index in node.saved} | self.tape.region  # which ends when it has run
        last = max((p for p, node in enumerate(nodes) if node.unpacks), default=-1)
        uses: dict[int, int] = {}
        for position, node in enumerate(nodes):
            for tensor in (*node.inputs, *node.outputs):
                uses[tensor.storage] = position
            uses.update(dict.fromkeys(node.caller_holds, position))
        self.fetch(segment.on_host)
        alive: set[int] = set()
        untouched = self.untouched[segment] = list(segment.kept)
        for position, node in enumerate(nodes[: last + 1]):
            made = node.made
            stops_before_output = position == last and not set(node.saved) & set(made)
            if stops_before_output:
                break
            self.operator = self.tape.operator(segment.start + position, When.AGAIN)
            for index in made:
                if index not in alive and index not in segment.inputs:
                    if index in segment.kept:
                        untouched.remove(index)
                    else:
                        self.make_again(index)
                    alive.add(index)
            for index in sorted(alive):
                if index not in lasting and uses.get(index, position) <= position:
                    self.release(self.current(index))
                    alive.discard(index)
        for node in nodes:
            self.hold(self.current(index) for index in node.saved)
        self.let_go(self.current(index) for index in sorted(alive))
        self.let_go(self.current(index) for index in segment.on_host)

    def fetch(self, inputs: Iterable[int]) -> None:
        """Copies of a segment's inputs, from the host, which stand for them from now on."""
        self.operator = FETCH
        for index in inputs:
            storage = self.tape.storages[index]
            copy = self.tape.store(f"{storage.name}, fetched", storage.shape, storage.dtype, SOURCE, rule=storage.rule)
            self.stand_ins[index] = copy
            self.allocate(copy)

    def make_again(self, index: int) -> None:
        """Allocate a storage of a segment anew, or a stand-in for it where the first one is still alive."""
        if self.references.get(index, 0):
            storage = self.tape.storages[index]
            self.stand_ins[index] = self.tape.store(
                f"{storage.name} again", storage.shape, storage.dtype, storage.citation, rule=storage.rule
            )
        self.allocate(self.current(index))

    def current(self, index: int) -> int:
        """The storage that stands for `index` now."""
        return self.stand_ins.get(index, index)

    def step(self, node: Node, *, takes: bool) -> None:
        """One operator's backward.

        Args:
            node: the operator.
            takes: whether it takes its saved tensors out of what a checkpoint has recomputed: then they are gone when
                its own backward returns, before the engine casts its results, or sums them over axes that were
                broadcast (torch 2.13 torch/utils/checkpoint.py, unpack_hook; engine.cpp, validate_outputs).
        """
        incoming = [self.pending.pop(tensor) for tensor in node.outputs if tensor in self.pending]
        if not incoming and node.outputs:
            self.let_go(self.current(index) for index in node.saved)
            return
        outgoing = self.results(node, incoming, takes=takes or bool(node.fetched))
        self.let_go(incoming)
        # Into the buffers of the operators before, then leaves' turn comes. With a bias the input is flattened before
        # the weight is transposed, so that its view comes after the weight (ATen native/Linear.cpp).
        later = [(index, tensor) for index, tensor in outgoing if node.summed and index in self.views]
        for index, tensor in outgoing:
            if (index, tensor) not in later:
                self.deposit(index, tensor)
        for index in node.parameters[:: -1 if node.last_arrives_first else 1]:
            if index not in self.tape.deferred:
                self.parameter_arrived(index)
        for total, *parts in node.sums:
            if not self.references.get(total, 0):
                self.allocate(total)
            self.let_go(parts)
        self.let_go(node.drops)
        for index in node.completes:
            self.parameter_arrived(index)
        for index, tensor in later:
            self.deposit(index, tensor)

    def results(self, node: Node, incoming: list[int], *, takes: bool) -> list[tuple[int, Tensor]]:
        """The gradients of an operator's inputs, in their dtypes and shapes, and of its parameters."""
        for index in (*node.fetched, *(node.parameters if node.parameters_first else ())):
            self.allocate(index)
        self.play(node.prepares)
        outgoing = self.outgoing(node, incoming)
        self.play(node.between)
        early = () if node.parameters_first else (index for index in node.parameters if index not in node.summed)
        for index in (*early, *node.backward_temporaries):
            self.allocate(index)
        self.let_go(node.backward_temporaries)
        if takes:
            self.let_go_of_saved(node)
        outgoing = [(self.sum_of(t) if index < 0 else index, t) for index, t in outgoing]
        for index in (*node.summed, *node.summed_later):
            self.allocate(index)
        self.let_go((*node.summed_later, *_left(node)))
        outgoing = self.as_wanted(node, outgoing)
        if not takes:
            self.let_go_of_saved(node)
        if self.ends_checkpoint is not None:
            self.end_checkpoint()
        return outgoing

    def outgoing(self, node: Node, incoming: list[int]) -> list[tuple[int, Tensor]]:
        """The gradients of an operator's inputs, made in order."""
        found: list[tuple[int, Tensor]] = []
        overwritten = iter(node.saved)
        for tensor, kind in zip(node.inputs, node.gradients, strict=True):
            written_over = next(overwritten) if kind == IN_PLACE else None
            if kind is None or not tensor.grad:
                continue
            if kind == SUMMED:
                found.append((-1, tensor))
                continue
            if kind in (SAME, IN_PLACE):
                source = incoming[0] if written_over is None else self.current(written_over)
                self.references[source] += 1
                found.append((source, tensor))
                continue
            output = node.outputs[0]
            # Of an operator in place the output is its input, of which it may be the narrower one.
            wide = "fp32" if any(each.dtype == "fp32" for each in (output, *node.inputs)) else output.dtype
            if kind == REDUCED:
                made = self.gradient_of(Tensor(tensor.storage, output.shape, wide))
            else:
                made = self.gradient_of(tensor, wide if kind == CAST else tensor.dtype)
            if kind == VIEW:
                self.views.add(made)
            found.append((made, tensor))
        return found

    def as_wanted(self, node: Node, outgoing: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
        """The same, those that the engine casts and sums in the dtype and shape of what they are gradients of.

        In the order of the operator's arguments: products make their gradients in the opposite one.

        Source: torch 2.13 torch/csrc/autograd/engine.cpp, validate_outputs.
        """
        kinds = zip(node.inputs, node.gradients, strict=True)
        others = {tensor for tensor, kind in kinds if kind in (CAST, REDUCED)}
        if not others:
            return outgoing
        found: list[tuple[int, Tensor]] = []
        for made, tensor in reversed(outgoing):
            wanted = self.gradient_of(tensor) if tensor in others else made
            if tensor in others:
                self.release(made)
            found.append((wanted, tensor))
        return found[::-1]

    def let_go_of_saved(self, node: Node) -> None:
        """What an operator has saved, once nothing reads it any more."""
        self.let_go((*(self.current(index) for index in node.saved), *node.fetched))
        self.reads |= dict.fromkeys(node.tables, len(self.events))

    def play(self, steps: Iterable[tuple[int, int]]) -> None:
        """What an operator makes and drops on its way."""
        for index, sign in steps:
            if sign > 0:
                self.allocate(index)
            else:
                self.release(index)

    def gradient_of(self, tensor: Tensor, dtype: str = "") -> int:
        """A new storage for the gradient of a tensor, allocated; in its dtype, if no other is named."""
        name = f"gradient of {self.tape.storages[tensor.storage].name}"
        shape, citation = tensor.shape, "autograd: the gradient has its tensor's shape"
        index = self.tape.store(name, shape, dtype or tensor.dtype, citation)
        self.allocate(index)
        return index

    def sum_of(self, tensor: Tensor) -> int:
        """A new storage for a gradient that the engine sums over leading axes, of which it hands on a view."""
        made = self.gradient_of(tensor)
        self.views.add(made)
        return made

    def parameter_arrived(self, index: int) -> None:
        """A parameter's gradient is complete: copy it, keep it or drop it, as the recipe says."""
        if self.main_gradient_dtype is not None:
            gradient = self.tape.storages[index]
            copy = self.tape.store(
                f"{gradient.name} in {self.main_gradient_dtype}",
                gradient.shape,
                self.main_gradient_dtype,
                "MT-NLG (arXiv 2201.11990) section 3.1: an fp32 copy of each gradient",
                component=Component.GRADIENTS,
            )
            self.allocate(copy)
        if not self.keeps_gradients:
            self.release(index)

    def deposit(self, index: int, tensor: Tensor) -> None:
        """Hand a gradient on; a second one of the same tensor is added to the first."""
        if tensor not in self.pending:
            self.pending[tensor] = index
            return
        first = self.pending[tensor]
        if self.references[first] == 1 and first not in self.views and not tensor.subclass:
            self.release(index)
            return
        total = self.gradient_of(tensor)
        self.release(first)
        self.release(index)
        self.pending[tensor] = total

    def allocate(self, index: int) -> None:
        """One more reference; the first one allocates."""
        self.references[index] = self.references.get(index, 0) + 1
        if self.references[index] == 1:
            self.events.append(Event(index, 1, self.operator))

    def let_go(self, storages: Iterable[int]) -> None:
        """One reference less to each of some storages."""
        for index in storages:
            self.release(index)

    def release(self, index: int) -> None:
        """One reference less; the last one frees."""
        self.references[index] -= 1
        if self.references[index] == 0:
            self.events.append(Event(index, -1, self.operator))


def _left(node: Node) -> Iterable[int]:
    """What an operator has made on its way and not dropped; most make nothing."""
    steps = (*node.prepares, *node.between)
    if not steps:
        return ()
    made = Counter(index for index, sign in steps for _ in range(max(sign, 0)))
    made.subtract(index for index, sign in steps if sign < 0)
    return made.elements()
