"""A tape: the operators of a block in the order in which the module runs them, on symbols instead of numbers.

Each operator notes what PyTorch allocates in forward, what autograd keeps for backward, and what backward allocates.
`compiled` turns the tape into two streams of allocations and releases, forward and backward, whose running sums give
what is saved, and the highest moment, for any sizes. So the formulas of activations, gradients in flight and
temporaries are not typed in one by one: they follow from the code of the block and the rules of its operators.

A tensor's bytes are the product of its axes' symbols and its dtype's size; the formula text is made from the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from memcalc.estimation.program import Event, Program, Storage
from memcalc.ledger.component import Component

Shape = tuple[str, ...]
Rule = Callable[[Mapping[str, int]], int]

SAME = "same"  # the gradient of an input is the gradient of the output itself: no bytes
NEW = "new"  # the gradient of an input is a new tensor of the input's shape and dtype


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor on the tape: a storage seen with a shape. Views share it, but have gradients of their own.

    `grad` says whether a gradient flows into the tensor at all.
    """

    storage: int
    shape: Shape
    dtype: str
    grad: bool = True


class ParameterGradient(NamedTuple):
    """A parameter whose gradient an operator's backward makes: its row in the parameter table, and its dtype there."""

    module: str
    tensor: str
    dtype: str


@dataclass(slots=True, eq=False)
class Node:
    """One operator: its tensors, and what its backward needs, makes and drops."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    saved: tuple[int, ...]
    gradients: tuple[str | None, ...]  # of each input: SAME, NEW or None
    forward_temporaries: tuple[int, ...] = ()
    backward_temporaries: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    also_allocates: tuple[int, ...] = ()
    caller_holds: tuple[int, ...] = ()  # not read here, but named by the Python code that called the operator


class Segment(NamedTuple):
    """Operators that keep nothing but their inputs, and run again when backward reaches them."""

    start: int
    stop: int
    inputs: tuple[int, ...]


@dataclass(slots=True)
class Tape:
    """Records operators. Block authors call the methods of `Operators`, which calls `node`.

    Args:
        kind: the component of what the block saves: ACTIVATIONS for layers, LOGITS_AND_LOSS for the head.
    """

    kind: Component = Component.ACTIVATIONS
    storages: list[Storage] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    held: set[int] = field(default_factory=set)  # alive until the whole backward has finished
    region: set[int] = field(default_factory=set)  # alive until the autocast region ends, with the loss
    names: set[int] = field(default_factory=set)  # alive until the model's forward returns: its Python variables
    deferred: set[int] = field(default_factory=set)  # parameter gradients that wait for another block's (tied)
    arrives_summed: int | None = None  # the parameter gradient that this block completes (tied)
    segments: list[Segment] = field(default_factory=list)
    boundary: int = 0  # number of nodes that belong to forward; the rest is the loss
    entry: Tensor | None = None

    def store(
        self,
        name: str,
        shape: Shape,
        dtype: str,
        citation: str,
        *,
        rule: Rule | None = None,
        component: Component | None = None,
    ) -> int:
        """A new storage on the tape; `rule` gives its bytes where they are no product of the axes."""
        self.storages.append(Storage(name, shape, dtype, citation, rule, component))
        return len(self.storages) - 1

    def input(self, name: str, shape: Shape, dtype: str, citation: str) -> Tensor:
        """The tensor the block is given: alive when forward enters, its gradient is what backward hands on."""
        self.entry = Tensor(self.store(name, shape, dtype, citation), shape, dtype)
        return self.entry

    def new(self, name: str, shape: Shape, dtype: str, citation: str, *, grad: bool = True) -> Tensor:
        """A new tensor with a storage of its own."""
        return Tensor(self.store(name, shape, dtype, citation), shape, dtype, grad)

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor alive until the step lets it go after backward."""
        self.held.add(tensor.storage)

    def recompute(self, output: Tensor, inputs: tuple[Tensor, ...]) -> None:
        """Checkpoint the operators that lead from `inputs` to `output`, the last one recorded."""
        storages = tuple(dict.fromkeys(tensor.storage for tensor in inputs))
        made = [p for p, node in enumerate(self.nodes) if any(t in inputs for t in node.outputs)]
        assert output in self.nodes[-1].outputs
        self.segments.append(Segment(max(made) + 1, len(self.nodes), storages))

    def recompute_all(self) -> None:
        """Checkpoint the whole block: only its input is kept."""
        assert self.entry is not None
        self.segments = [Segment(0, len(self.nodes), (self.entry.storage,))]

    def end_forward(self) -> None:
        """What follows belongs to the loss."""
        self.boundary = len(self.nodes)


def compiled(tape: Tape, output: Tensor | None, *, keeps_gradients: bool, main_gradient_dtype: str | None) -> Program:
    """The tape as streams of allocations and releases.

    Args:
        tape: the recorded block.
        output: what the block hands to the next one; None for the head, whose output is the loss.
        keeps_gradients: whether a parameter's gradient stays alive once it is made, or is dropped at once because it
            is added to one that exists already.
        main_gradient_dtype: dtype of a second copy made as each gradient arrives (mixed-20), or None.
    """
    kept = _kept(tape)
    boundary = tape.boundary or len(tape.nodes)
    alive = _start(tape)
    head = () if output is None else (output.storage,)
    forward = [Event(index, 1, "start") for index in alive]
    forward += _forward(tape, range(boundary), alive, kept | tape.region | tape.names | set(head))
    loss = _forward(tape, range(boundary, len(tape.nodes)), alive, kept | tape.region)
    forward += [Event(index, -1, "end") for index in head if index not in kept]  # it is the next block's input
    backward = _Backward(tape, kept, keeps_gradients, main_gradient_dtype).run(output)
    saved = {index for node in tape.nodes for index in node.saved} | kept
    storages = tuple(
        storage if storage.component is not None else storage._replace(component=_component(tape, index, saved))
        for index, storage in enumerate(tape.storages)
    )
    region, names = tuple(sorted(tape.region - kept)), tuple(sorted(tape.names - kept - tape.region))
    return Program(storages, tuple(forward), tuple(loss), tuple(backward), region, names)


def _start(tape: Tape) -> set[int]:
    """What exists when the block's forward begins: its input, and tables that are made once and held."""
    made = {index for node in tape.nodes for index in (*(t.storage for t in node.outputs), *node.also_allocates)}
    entry = set() if tape.entry is None else {tape.entry.storage}
    return entry | ((tape.held | tape.names) - made)


def _kept(tape: Tape) -> set[int]:
    """What is alive between forward and backward: inputs of segments, and what operators outside segments save."""
    kept = set(tape.held)
    inside = {position for segment in tape.segments for position in range(segment.start, segment.stop)}
    for segment in tape.segments:
        kept.update(segment.inputs)
    for position, node in enumerate(tape.nodes):
        if position not in inside:
            kept.update(node.saved)
    return kept


def _component(tape: Tape, index: int, saved: set[int]) -> Component:
    # In the head, what has the size of the logits belongs to the loss whether autograd keeps it or not.
    logits = any(axis.startswith("V") for axis in tape.storages[index].shape)
    if index in saved or (tape.kind is Component.LOGITS_AND_LOSS and logits):
        return tape.kind
    return Component.TEMPORARIES


def _forward(tape: Tape, positions: range, alive: set[int], kept: set[int]) -> list[Event]:
    """Each storage appears with the operator that makes it and goes after the last one that reads it, unless kept."""
    last_use: dict[int, int] = {}
    for position in range(len(tape.nodes)):
        node = tape.nodes[position]
        for tensor in (*node.inputs, *node.outputs):
            last_use[tensor.storage] = position
        for index in node.caller_holds:
            last_use[index] = position
    events: list[Event] = []
    for position in positions:
        node = tape.nodes[position]
        made = dict.fromkeys([*(tensor.storage for tensor in node.outputs), *node.also_allocates])
        new = [index for index in made if index not in alive]
        events += [Event(index, 1, node.name) for index in (*new, *node.forward_temporaries)]
        alive.update(new)
        gone = [index for index in sorted(alive) if index not in kept and last_use.get(index, position) <= position]
        events += [Event(index, -1, node.name) for index in (*node.forward_temporaries, *gone)]
        alive.difference_update(gone)
    return events


class _Backward:
    """The autograd engine's bookkeeping: operators in reverse, saved tensors dropped once used, gradients summed.

    Source: torch 2.13 torch/csrc/autograd/engine.cpp (evaluate_function) and input_buffer.cpp (accumulate):
    an operator's saved tensors and incoming gradient are let go after its outputs exist; a second gradient of a tensor
    is added into the first in place if nothing else refers to it, else into a third one.
    """

    def __init__(self, tape: Tape, kept: set[int], keeps_gradients: bool, main_gradient_dtype: str | None) -> None:
        self.tape = tape
        self.keeps_gradients = keeps_gradients
        self.main_gradient_dtype = main_gradient_dtype
        self.events: list[Event] = []
        self.references: dict[int, int] = {}
        self.pending: dict[Tensor, int] = {}
        self.stand_ins: dict[int, int] = {}
        self.label = ""
        self.inside = {p: segment for segment in tape.segments for p in range(segment.start, segment.stop)}
        for index in kept:
            self.references[index] = 0
        for position, node in enumerate(tape.nodes):
            if position not in self.inside:
                self.hold(node.saved)
        for segment in tape.segments:
            self.hold(segment.inputs)
        self.hold(tape.held)

    def hold(self, storages: Iterable[int]) -> None:
        for index in storages:
            self.references[index] = self.references.get(index, 0) + 1

    def run(self, output: Tensor | None) -> list[Event]:
        last = output if output is not None else self.tape.nodes[-1].outputs[0]
        self.pending[last] = self.gradient_of(last)
        if output is None:
            self.hold([self.pending[last]])  # the caller of backward() keeps the loss's own gradient until it returns
        if self.tape.entry is None:
            self.let_go(self.tape.held)  # the first block: no later one reads the shared tables any more
        for position in range(len(self.tape.nodes) - 1, -1, -1):
            segment = self.inside.get(position)
            if segment is not None and position == segment.stop - 1:
                self.run_again(segment)
            self.step(self.tape.nodes[position])
            if segment is not None and position == segment.start:
                self.let_go(segment.inputs)
        if self.tape.arrives_summed is not None:
            # The tied head's gradient, which its block counts, is now complete.
            self.references[self.tape.arrives_summed] = 1
            self.parameter_arrived(self.tape.arrives_summed)
        if self.tape.entry is not None and self.tape.entry in self.pending:
            self.label = "end"
            self.release(self.pending[self.tape.entry])  # it is the incoming gradient of the block before
        return self.events

    def run_again(self, segment: Segment) -> None:
        """Recompute a segment up to its last saved tensor (torch/utils/checkpoint.py stops early).

        A tensor that something outside keeps alive already is made a second time.
        """
        nodes = self.tape.nodes[segment.start : segment.stop]
        saved = {index for node in nodes for index in node.saved}
        last = max((p for p, node in enumerate(nodes) if node.saved), default=-1)
        uses: dict[int, int] = {}
        for position, node in enumerate(nodes):
            for tensor in (*node.inputs, *node.outputs):
                uses[tensor.storage] = position
        alive: set[int] = set()
        for position, node in enumerate(nodes[: last + 1]):
            made = dict.fromkeys([*(tensor.storage for tensor in node.outputs), *node.also_allocates])
            stops_before_output = position == last and not set(node.saved) & set(made)
            if stops_before_output:
                break
            self.label = f"{node.name} again"
            for index in made:
                if index not in alive and index not in segment.inputs:
                    self.make_again(index)
                    alive.add(index)
            for index in sorted(alive):
                if index not in saved and uses.get(index, position) <= position:
                    self.release(self.current(index))
                    alive.discard(index)
        for node in nodes:
            self.hold(self.current(index) for index in node.saved)
        self.let_go(self.current(index) for index in sorted(alive))

    def make_again(self, index: int) -> None:
        if self.references.get(index, 0):
            storage = self.tape.storages[index]
            self.stand_ins[index] = self.tape.store(
                f"{storage.name} again", storage.shape, storage.dtype, storage.citation, rule=storage.rule
            )
        self.allocate(self.current(index))

    def current(self, index: int) -> int:
        return self.stand_ins.get(index, index)

    def step(self, node: Node) -> None:
        self.label = node.name
        incoming = [self.pending.pop(tensor) for tensor in node.outputs if tensor in self.pending]
        if not incoming and (node.inputs or not node.outputs):
            self.let_go(self.current(index) for index in node.saved)
            return
        outgoing: list[tuple[int, Tensor]] = []
        for tensor, kind in zip(node.inputs, node.gradients, strict=True):
            if kind is None or not tensor.grad:
                continue
            if kind == SAME:
                self.references[incoming[0]] += 1
                outgoing.append((incoming[0], tensor))
            else:
                outgoing.append((self.gradient_of(tensor), tensor))
        for index in (*node.parameters, *node.backward_temporaries):
            self.allocate(index)
        self.let_go(node.backward_temporaries)
        self.let_go(self.current(index) for index in node.saved)
        self.let_go(incoming)
        for index in node.parameters:
            if index not in self.tape.deferred:
                self.parameter_arrived(index)
        for index, tensor in outgoing:
            self.deposit(index, tensor)

    def gradient_of(self, tensor: Tensor) -> int:
        name = f"gradient of {self.tape.storages[tensor.storage].name}"
        index = self.tape.store(name, tensor.shape, tensor.dtype, "autograd: the gradient has its tensor's shape")
        self.allocate(index)
        return index

    def parameter_arrived(self, index: int) -> None:
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
        if tensor not in self.pending:
            self.pending[tensor] = index
            return
        first = self.pending[tensor]
        if self.references[first] == 1:
            self.release(index)
            return
        total = self.gradient_of(tensor)
        self.release(first)
        self.release(index)
        self.pending[tensor] = total

    def allocate(self, index: int) -> None:
        self.references[index] = self.references.get(index, 0) + 1
        if self.references[index] == 1:
            self.events.append(Event(index, 1, self.label))

    def let_go(self, storages: Iterable[int]) -> None:
        for index in storages:
            self.release(index)

    def release(self, index: int) -> None:
        self.references[index] -= 1
        if self.references[index] == 0:
            self.events.append(Event(index, -1, self.label))
