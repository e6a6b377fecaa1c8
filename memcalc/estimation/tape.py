"""A tape: the operators of a block in the order in which the module runs them, on symbols instead of numbers.

Each operator notes what PyTorch allocates in forward, what autograd keeps for backward, and what backward allocates.
`compilation.compiled` turns the tape into two streams of allocations and releases, forward and backward, whose running
sums give what is saved, and the highest moment, for any sizes. So the formulas of activations, gradients in flight and
temporaries are not typed in one by one: they follow from the code of the block and the rules of its operators.

A tensor's bytes are the product of its axes' symbols and its dtype's size; the formula text is made from the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from memcalc.estimation.program import Operator, Storage, Table, When
from memcalc.ledger.component import Component

Shape = tuple[str, ...]
Rule = Callable[[Mapping[str, int]], int]

OF_THE_HOST = -2  # in place of a storage: a tensor that no device has
SAME = "same"  # the gradient of an input is the gradient of the output itself: no bytes
NEW = "new"  # the gradient of an input is a new tensor of the input's shape and dtype
VIEW = "view"  # a new tensor that is handed on as a view of what was made
CAST = "cast"  # a new tensor of the output's dtype, which the engine casts to the input's
REDUCED = "reduced"  # a new tensor of the output's shape, which the engine sums over axes that were broadcast
SUMMED = "summed"  # a new tensor that the engine sums from the output's gradient, once the operator has returned
IN_PLACE = "in place"  # the gradient of the n-th such input lies where the n-th saved tensor is, written over it


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor on the tape: a storage seen with a shape. Views share it, but have gradients of their own.

    `grad` says whether a gradient flows into the tensor at all; the operator that makes the tensor settles it.
    `subclass` says whether its gradients are of a tensor subclass, whose sums are never made in place.
    `strided` says whether it lies in another order than that of its axes or with gaps, as transposed ones and parts do.
    """

    storage: int
    shape: Shape
    dtype: str
    grad: bool = True
    subclass: bool = False
    strided: bool = False
    flat: bool = False  # seen as a matrix, of all tokens


@dataclass(slots=True, eq=False)
class Node:
    """One operator: its tensors, and what its backward needs, makes and drops."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    saved: tuple[int, ...]
    gradients: tuple[str | None, ...]  # of each input: SAME, NEW, VIEW, CAST, REDUCED, SUMMED, IN_PLACE or None
    forward_temporaries: tuple[int, ...] = ()
    backward_temporaries: tuple[int, ...] = ()
    prepares: tuple[tuple[int, int], ...] = ()  # (storage, +1 or -1): what backward makes and drops before its results
    between: tuple[tuple[int, int], ...] = ()  # and after its inputs' gradients, before those of its parameters
    summed_later: tuple[int, ...] = ()  # buffers of the engine's sums, once the operator's backward has returned
    parameters: tuple[int, ...] = ()
    summed: tuple[int, ...] = ()  # of these, what the engine sums once the operator has returned
    last_arrives_first: bool = False  # of `parameters`: addmm's bias is a leaf, its weight is seen transposed
    parameters_first: bool = False  # whether backward makes their gradients before those of its inputs
    also_allocates: tuple[int, ...] = ()
    made_first: tuple[int, ...] = ()  # of these, what is there before the outputs
    caller_holds: tuple[int, ...] = ()  # not read here, but named by the Python code that called the operator
    sums: tuple[tuple[int, ...], ...] = ()  # deferred parameter gradients, each with the parts that are added to it now
    completes: tuple[int, ...] = ()  # those that get their last part here
    drops: tuple[int, ...] = ()  # what `sums` have made and need no more
    keeps_weight: bool = False  # a frozen one, for the gradient of the input: a saved tensor, if no new memory
    variables: tuple[Tensor, ...] | None = (
        None  # what autograd saves, where this is not `saved` one by one: weights, views
    )
    tables: tuple[str, ...] = ()  # those of the model, made once in each forward, that it saves
    staged_first: tuple[int, ...] = ()  # made one by one, on the way to the host, before the operator runs
    staged_last: tuple[int, ...] = ()  # and after it has
    fetched: tuple[int, ...] = ()  # copies of what is saved on the host, there while its backward runs
    module: str = ""  # whose parameters it reads, as state_dict names it in its unit
    multiplies: bool = False  # whether cuBLAS runs it

    @property
    def made(self) -> tuple[int, ...]:
        """What forward makes, in order."""
        return tuple(dict.fromkeys((*self.made_first, *(y.storage for y in self.outputs), *self.also_allocates)))

    @property
    def unpacks(self) -> bool:
        """Whether backward asks for a saved tensor, which makes a checkpoint recompute."""
        return bool(self.saved) or self.keeps_weight


class Segment(NamedTuple):
    """Operators that keep their inputs and some results, and run again when backward reaches them: all but those."""

    start: int
    stop: int
    inputs: tuple[int, ...]
    kept: tuple[int, ...] = ()
    fetched: bool = False  # the inputs are on the host, and fetched when it runs again

    @property
    def on_device(self) -> tuple[int, ...]:
        """The inputs that the device keeps."""
        return () if self.fetched else self.inputs

    @property
    def on_host(self) -> tuple[int, ...]:
        """The inputs that the host keeps."""
        return self.inputs if self.fetched else ()


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
    read_by: dict[int, str] = field(default_factory=dict)  # some of these: until these layers have (see stages.READERS)
    given: set[int] = field(default_factory=set)  # beside the input, alive when forward begins: a cache so far
    region: set[int] = field(default_factory=set)  # alive until the autocast region ends, with the loss
    names: set[int] = field(default_factory=set)  # alive until the model's forward returns: its Python variables
    handed: set[int] = field(default_factory=set)  # alive until the next layer returns, whose name for them it takes
    deferred: set[int] = field(default_factory=set)  # parameter gradients that wait for another block's (tied)
    arrives_summed: int | None = None  # the parameter gradient that this block completes (tied)
    segments: list[Segment] = field(default_factory=list)
    offloads: bool = False  # what autograd saves is the host's
    packed: list[int] = field(default_factory=list)  # what the host keeps, by the storages it is fetched into
    leaves: dict[int, Node] = field(default_factory=dict)  # results that were told to need a gradient, and of what
    boundary: int = 0  # number of nodes that belong to forward; the rest is the loss
    head: int | None = None  # number of nodes that come before the language-model head
    tied_gradient: int = -1  # the gradient of a head's matrix that is the embedding's
    tied_sum: int = -1  # of the embedding: the sum of both gradients, where it is a tensor of its own
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
        parameter: str = "",
        table: Table | None = None,
    ) -> int:
        """A new storage on the tape, see `Storage`."""
        self.storages.append(Storage(name, shape, dtype, citation, rule, component, parameter, table))
        return len(self.storages) - 1

    def input(self, name: str, shape: Shape, dtype: str, citation: str, *, grad: bool = True) -> Tensor:
        """The tensor the block is given: alive when forward enters, its gradient is what backward hands on."""
        self.entry = Tensor(self.store(name, shape, dtype, citation), shape, dtype, grad)
        return self.entry

    def new(self, name: str, shape: Shape, dtype: str, citation: str, *, grad: bool = True) -> Tensor:
        """A new tensor with a storage of its own."""
        return Tensor(self.store(name, shape, dtype, citation), shape, dtype, grad)

    def record(self, node: Node, *, trains: bool = False) -> None:
        """The next operator, by autograd's rule: where no input or parameter needs a gradient, it keeps nothing.

        Source: torch 2.13 torch/csrc/autograd/functions/utils.h, compute_requires_grad: only if it says so does an
        operator get a node in the graph, and with it saved tensors and a backward.

        Args:
            node: the operator, as it is where every input needs a gradient.
            trains: whether it has a parameter with a gradient that `node.parameters` does not name.
        """
        if not (trains or node.parameters or any(tensor.grad for tensor in node.inputs)):
            for tensor in node.outputs:
                tensor.grad = False
            node.saved, node.backward_temporaries, node.keeps_weight, node.variables = (), (), False, None
            node.gradients = (None,) * len(node.inputs)
        self.nodes.append(node)

    def forget_gradients(self) -> None:
        """The same operators without gradients: nothing is saved or runs again."""
        self.segments.clear()
        self.leaves.clear()
        for node in self.nodes:
            node.saved, node.keeps_weight, node.variables, node.tables = (), False, None, ()

    def still_named(self, *tensors: Tensor) -> None:
        """Tensors that a Python variable held until here, though no operator reads them any more."""
        self.nodes[-1].caller_holds += tuple(tensor.storage for tensor in tensors)

    def also_saves(self, *tensors: Tensor) -> None:
        """What the last operator saves beside, and many others, too: a mask, a table. No new memory of the device."""
        node = self.nodes[-1]
        node.variables = (*self.variables_of(node), *tensors)

    def reads(self, *tables: str) -> None:
        """Tables of the model, by name, that the last operator saves, where it saves anything."""
        node = self.nodes[-1]
        node.tables = tables if any(each is not None for each in node.gradients) else ()

    def variables_of(self, node: Node) -> tuple[Tensor, ...]:
        """The tensors that an operator saves, each as it sees it."""
        if node.variables is not None:
            return node.variables
        return tuple(self.whole(index) for index in node.saved)

    def whole(self, index: int) -> Tensor:
        """A storage seen as it is."""
        return Tensor(index, self.storages[index].shape, self.storages[index].dtype)

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor alive until the step lets it go after backward."""
        self.held.add(tensor.storage)

    def recompute(self, output: Tensor, inputs: tuple[Tensor, ...]) -> None:
        """Checkpoint the operators that lead from `inputs` to `output`, the last one recorded."""
        storages = tuple(dict.fromkeys(tensor.storage for tensor in inputs))
        made = [p for p, node in enumerate(self.nodes) if any(t in inputs for t in node.outputs)]
        assert output in self.nodes[-1].outputs
        self.segments.append(Segment(max(made) + 1, len(self.nodes), storages))

    def recompute_all(self, kept: tuple[int, ...] = ()) -> None:
        """Checkpoint the whole block: its input is kept, and of what it makes these storages alone."""
        assert self.entry is not None
        self.segments = [Segment(0, len(self.nodes), (self.entry.storage,), tuple(dict.fromkeys(kept)))]

    def made_by(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """What operators of these names make: their results, and what they keep beside them."""
        nodes = [node for node in self.nodes if node.name in names]
        return tuple(index for node in nodes for index in (*(t.storage for t in node.outputs), *node.also_allocates))

    def begin_head(self) -> None:
        """What follows is the language-model head, and the loss behind it."""
        self.head = len(self.nodes)

    def operator(self, position: int, when: When = When.RUN) -> Operator:
        """The operator at a position of the tape, as events know it."""
        node = self.nodes[position]
        return Operator(
            node.name,
            when,
            position,
            node.module,
            node.outputs[0].storage if node.outputs else -1,
            node.multiplies,
            in_head=self.head is not None and position >= self.head,
            in_loss=0 < self.boundary <= position,
        )

    def end_forward(self) -> None:
        """What follows belongs to the loss."""
        self.boundary = len(self.nodes)
