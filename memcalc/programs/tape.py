"""Tape: the operators of a block in execution order, on symbols instead of numbers.

Each operator records what PyTorch allocates in forward, what autograd saves for backward, and what backward allocates.
`compilation.compiled` turns the tape into two streams of allocations and frees, forward and backward. Their running
sums give saved bytes and peaks for any sizes. So formulas for activations, gradients and temporaries are not written
by hand: they follow from the block's code and its operators' rules.

A tensor's bytes are the product of its axes' symbols and its dtype's size; the formula text uses the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from memcalc.ledger.component import Component
from memcalc.programs.program import Activity, BlockOperator, SharedTable, Storage

Shape = tuple[str, ...]
Rule = Callable[[Mapping[str, int]], int]
Steps = tuple[tuple[int, int], ...]  # storages, each with +1 where it is allocated or -1 where it is freed

OF_THE_HOST = -2  # replaces a storage: a tensor that no device holds
SAME = "same"  # the input's gradient is the output's gradient: no bytes
NEW = "new"  # the input's gradient is a new tensor of the input's shape and dtype
VIEW = "view"  # a new tensor that is passed on as a view
ALIAS = "alias"  # the input's gradient is a view of the output's gradient: no bytes
SCALED = "scaled"  # a new tensor, multiplied by a number into another one
CAST = "cast"  # a new tensor of the output's dtype, which the engine casts to the input's
REDUCED = "reduced"  # a new tensor of the output's shape, which the engine sums over broadcast axes
SUMMED = "summed"  # a new tensor that the engine sums from the output's gradient after the operator has returned
IN_PLACE = "in place"  # the gradient of the n-th such input overwrites the n-th saved tensor
PREPARED = "prepared"  # the gradient of the n-th such input is the n-th of `prepared`, passed on as a view


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor on the tape: a storage seen with a shape. Views share the storage, but have separate gradients."""

    storage: int  # index of its storage
    shape: Shape  # its axes in symbols
    dtype: str  # its dtype
    grad: bool = True  # whether it requires a gradient; set by the operator that produces it
    subclass: bool = False  # whether its gradients are tensor subclasses, which are never accumulated in place
    strided: bool = False  # whether it is not contiguous: transposed, or a slice with gaps
    flat: bool = False  # whether it is viewed as a matrix with one row per token
    leaf: bool = False  # whether it is set to require a gradient


class ForwardMemory(NamedTuple):
    """What an operator's forward allocates besides its outputs."""

    temporaries: tuple[int, ...] = ()  # freed before it returns
    also: tuple[int, ...] = ()  # further results, such as statistics for backward
    first: tuple[int, ...] = ()  # those of `also` that it allocates before its outputs
    for_graph: tuple[int, ...] = ()  # those of `also` that a forward without gradients does not allocate
    staged_first: tuple[int, ...] = ()  # allocated one at a time on the way to the host, before the operator runs
    staged_last: tuple[int, ...] = ()  # the same, after it has run

    def without_graph(self) -> ForwardMemory:
        """Return what a forward without gradients allocates."""
        return self._replace(also=tuple(index for index in self.also if index not in self.for_graph))


class BackwardMemory(NamedTuple):
    """What an operator's backward allocates and frees besides its gradients, and the order of these."""

    temporaries: tuple[int, ...] = ()  # live at the same time after all gradients, and freed before it returns
    prepares: Steps = ()  # steps before its results
    prepared: tuple[int, ...] = ()  # input gradients that `prepares` allocates
    frees_early: tuple[int, ...] = ()  # of `prepares`, what the first input gradient alone is computed from
    between: Steps = ()  # steps between input gradients and parameter gradients
    summed: tuple[int, ...] = ()  # parameter gradients that the engine sums after the operator's backward has returned
    summed_later: Steps = ()  # steps of these sums, `summed` included
    python_function: bool = False  # a torch.autograd.Function; its incoming gradient is freed when its backward returns
    reversed_accumulation: bool = False  # of parameter gradients: addmm's bias is a leaf, its weight a transposed view
    input_viewed_first: bool = False  # before the parameters: a view of its gradient is passed on after theirs
    parameters_first: bool = False  # whether it produces parameter gradients before input gradients
    copied_from_host: tuple[int, ...] = ()  # copies of saved tensors, on the GPU while it runs


class DeferredGradients(NamedTuple):
    """Parameter gradients that several operators compute parts of, of which backward keeps the sum."""

    sums: tuple[tuple[int, ...], ...] = ()  # each gradient with the parts that are added to it here
    completes: tuple[int, ...] = ()  # gradients that get their last part here
    drops: tuple[int, ...] = ()  # temporaries of `sums` that are freed


OUTPUTS_ALONE, GRADIENTS_ALONE, NONE_DEFERRED = ForwardMemory(), BackwardMemory(), DeferredGradients()


@dataclass(slots=True, eq=False)
class Node:
    """One operator: its tensors, and what its forward and backward allocate and free."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    saved: tuple[int, ...]
    gradients: tuple[str | None, ...]  # for each input one of SAME to PREPARED above, or None
    parameters: tuple[int, ...] = ()  # their gradients
    forward: ForwardMemory = OUTPUTS_ALONE
    backward: BackwardMemory = GRADIENTS_ALONE
    deferred: DeferredGradients = NONE_DEFERRED
    referenced_by_caller: tuple[int, ...] = ()  # not read here, but referenced by the calling Python code
    # saved for backward by an operator without a gradient, until nothing references its result after this operator; a
    # checkpoint does not save them (torch/utils/checkpoint.py, _checkpoint_hook)
    referenced_by_graph: tuple[int, ...] = ()
    keeps_weight: bool = False  # a frozen weight saved for the input gradient: a saved tensor without new memory
    variables: tuple[Tensor, ...] | None = None  # saved tensors, where they differ from `saved`: weights, views
    tables: tuple[str, ...] = ()  # shared tables of the model that it saves
    module: str = ""  # module of the parameters it reads, as in state_dict within its unit
    multiplies: bool = False  # whether it is a cuBLAS matmul
    written: int = -1  # what backward's first matmul writes; -1: the first storage that backward allocates
    kernel: str = ""  # the function that torch.compile compiles for it; "": none
    buffer: str = ""  # a persistent buffer that its first run allocates before it; "": none

    @property
    def allocated(self) -> tuple[int, ...]:
        """The storages that forward allocates, in order."""
        return tuple(dict.fromkeys((*self.forward.first, *(y.storage for y in self.outputs), *self.forward.also)))

    @property
    def allocated_alone(self) -> tuple[int, ...]:
        """The storages that a forward without gradients allocates, in order."""
        return tuple(index for index in self.allocated if index not in self.forward.for_graph)

    @property
    def unpacks(self) -> bool:
        """Whether backward unpacks a saved tensor, which makes a checkpoint recompute."""
        return bool(self.saved) or self.keeps_weight


class CheckpointSegment(NamedTuple):
    """Checkpointed operators: their inputs and some results are kept, the rest is recomputed in backward.

    Of `saved` a storage that no operator of the segment makes is freed when the last one that reads it has run again.
    """

    start: int
    stop: int
    inputs: tuple[int, ...]
    saved: tuple[int, ...] = ()
    inputs_on_host: bool = False  # the inputs are in host memory and copied back for recomputation

    @property
    def on_device(self) -> tuple[int, ...]:
        """The inputs kept on the device."""
        return () if self.inputs_on_host else self.inputs

    @property
    def on_host(self) -> tuple[int, ...]:
        """The inputs kept in host memory."""
        return self.inputs if self.inputs_on_host else ()


@dataclass(slots=True, eq=False)
class LiveTensors:
    """Storages that stay live although no operator of the block's forward reads them any more."""

    held: set[int] = field(default_factory=set)  # until the whole backward has finished
    # those of `held` that are freed after these layers (see stages.READERS)
    read_by: dict[int, str] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)  # since before forward, besides the input: the KV cache so far
    region: set[int] = field(default_factory=set)  # until the autocast region ends, with the loss
    names: set[int] = field(default_factory=set)  # until the model's forward returns: its Python variables
    handed: set[int] = field(default_factory=set)  # until the next layer returns, which then references them


@dataclass(slots=True, eq=False)
class ParameterGradients:
    """Parameter gradients that are sums over several operators, or over two blocks with one weight (tied)."""

    deferred: set[int] = field(default_factory=set)  # those that wait for further parts
    arrives_summed: int | None = None  # the gradient that this block completes (tied)
    tied: int = -1  # of the LM head: the gradient of a weight tied to the embedding
    tied_sum: int = -1  # of the embedding: the sum of both gradients, where it is a separate tensor


@dataclass(slots=True, eq=False)
class Checkpoints:
    """Checkpoints of a block, and how they recompute."""

    segments: list[CheckpointSegment] = field(default_factory=list)  # the checkpointed operators
    stops_early: bool = True  # whether a recomputation ends with the last tensor that backward needs
    # whether a recomputation runs a separate backward, with its result and the given gradient live until it returns
    reentrant: bool = False

    @property
    def inside(self) -> dict[int, CheckpointSegment]:
        """The segment of each checkpointed operator, by its position on the tape."""
        return {position: segment for segment in self.segments for position in range(segment.start, segment.stop)}


@dataclass(slots=True, eq=False)
class Tape:
    """Recorder of operators. Block authors call the methods of `Operators`, which calls `record`."""

    # the component of what the block saves: ACTIVATIONS for layers, LOGITS_AND_LOSS for the LM head
    saved_component: Component = Component.ACTIVATIONS
    storages: list[Storage] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    live: LiveTensors = field(default_factory=LiveTensors)
    gradients: ParameterGradients = field(default_factory=ParameterGradients)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    arguments: list[Tensor] = field(default_factory=list)  # made for the block by its caller, by the first operators
    packed: list[int] | None = None  # saved tensors in host memory, by the storages they are copied back to
    leaves: dict[int, Node] = field(default_factory=dict)  # results set to require a gradient -> the operator
    boundary: int = 0  # number of nodes in forward; the rest is the loss
    head: int | None = None  # number of nodes before the LM head
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
        table: SharedTable | None = None,
    ) -> int:
        """Add a storage to the tape, see `Storage`; return its index."""
        self.storages.append(Storage(name, shape, dtype, citation, rule, component, parameter, table))
        return len(self.storages) - 1

    def input(
        self, name: str, shape: Shape, dtype: str, citation: str, *, grad: bool = True, leaf: bool = False
    ) -> Tensor:
        """Set the block's input: live when forward begins; backward passes on its gradient."""
        self.entry = Tensor(self.store(name, shape, dtype, citation), shape, dtype, grad, leaf=leaf)
        return self.entry

    def new(self, name: str, shape: Shape, dtype: str, citation: str, *, grad: bool = True) -> Tensor:
        """Return a new tensor with a new storage."""
        return Tensor(self.store(name, shape, dtype, citation), shape, dtype, grad)

    def record(self, node: Node, *, trains: bool = False) -> None:
        """Record the next operator; by autograd's rule it saves nothing if no input or parameter requires a gradient.

        Source: torch 2.13 torch/csrc/autograd/functions/utils.h, compute_requires_grad: only then does an operator get
        a graph node with saved tensors and a backward.

        Args:
            node: the operator, as if every input required a gradient.
            trains: whether it has a trainable parameter that is not in `node.parameters`.
        """
        if not (trains or node.parameters or any(tensor.grad for tensor in node.inputs)):
            for tensor in node.outputs:
                tensor.grad = False
            node.saved, node.keeps_weight, node.variables = (), False, None
            node.backward = node.backward._replace(temporaries=())
            node.gradients = (None,) * len(node.inputs)
        self.nodes.append(node)

    def forget_gradients(self) -> None:
        """Drop autograd from the tape: nothing is saved or recomputed."""
        self.checkpoints.segments.clear()
        self.leaves.clear()
        for node in self.nodes:
            node.saved, node.keeps_weight, node.variables, node.tables = (), False, None, ()
            node.forward = node.forward.without_graph()

    def still_referenced(self, *tensors: Tensor) -> None:
        """Keep tensors live until here because a Python variable still references them."""
        self.nodes[-1].referenced_by_caller += tuple(tensor.storage for tensor in tensors)

    def referenced_by_graph(self, *tensors: Tensor) -> None:
        """Keep tensors live until here because an operator that backward does not reach has saved them."""
        self.nodes[-1].referenced_by_graph += tuple(tensor.storage for tensor in tensors)

    def also_reads(self, *tensors: Tensor) -> None:
        """Add inputs of the last operator that get new gradients; it saves nothing for them."""
        node = self.nodes[-1]
        node.inputs, node.gradients = (*node.inputs, *tensors), (*node.gradients, *(NEW for _ in tensors))

    def also_saves(self, *tensors: Tensor) -> None:
        """Add shared tensors (a mask, a table) to what the last operator saves; they take no new device memory."""
        node = self.nodes[-1]
        node.variables = (*self.variables_of(node), *tensors)

    def reads(self, *tables: str) -> None:
        """Record the shared tables that the last operator saves, if it saves anything."""
        node = self.nodes[-1]
        node.tables = tables if any(each is not None for each in node.gradients) else ()

    def variables_of(self, node: Node) -> tuple[Tensor, ...]:
        """Return the tensors that an operator saves, in the shapes it sees."""
        if node.variables is not None:
            return node.variables
        return tuple(self.full_tensor(index) for index in node.saved)

    def full_tensor(self, index: int) -> Tensor:
        """Return a storage as a tensor with its full shape."""
        return Tensor(index, self.storages[index].shape, self.storages[index].dtype)

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor live until the step frees it after backward."""
        self.live.held.add(tensor.storage)

    def recompute(self, output: Tensor, inputs: tuple[Tensor, ...]) -> None:
        """Checkpoint the operators from `inputs` to `output`, which must be the last one recorded."""
        storages = tuple(dict.fromkeys(tensor.storage for tensor in inputs))
        made = [p for p, node in enumerate(self.nodes) if any(t in inputs for t in node.outputs)]
        assert output in self.nodes[-1].outputs
        self.checkpoints.segments.append(CheckpointSegment(max(made) + 1, len(self.nodes), storages))

    def recompute_all(self, kept: tuple[int, ...] = (), *, follows: bool = False) -> None:
        """Checkpoint the whole block: keep its input, its arguments and, of its results, only these storages.

        If it follows another block in one checkpoint, its input is a result that it frees when it has been recomputed.
        """
        assert self.entry is not None
        given = () if follows else (self.entry.storage,)
        inputs = (*given, *(tensor.storage for tensor in self.arguments))
        saved = tuple(dict.fromkeys((*((self.entry.storage,) if follows else ()), *kept)))
        self.checkpoints.segments = [CheckpointSegment(len(self.arguments), len(self.nodes), inputs, saved)]

    def allocated_by(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Return the storages that operators of these names allocate: results and other persistent buffers."""
        nodes = [node for node in self.nodes if node.name in names]
        return tuple(index for node in nodes for index in (*(t.storage for t in node.outputs), *node.forward.also))

    def begin_head(self) -> None:
        """Mark the start of the LM head and the loss after it."""
        self.head = len(self.nodes)

    def operator(self, position: int, activity: Activity = Activity.RUN) -> BlockOperator:
        """Return the operator at a position of the tape, as recorded in events."""
        node = self.nodes[position]
        results = tuple(tensor.storage for tensor in node.outputs) or node.allocated
        return BlockOperator(
            node.name,
            activity,
            position,
            node.module,
            results[0] if results else -1,
            node.multiplies,
            node.written,
            in_head=self.head is not None and position >= self.head,
            in_loss=0 < self.boundary <= position,
            kernel=node.kernel,
            buffer=node.buffer,
        )

    def end_forward(self) -> None:
        """Mark the start of the loss."""
        self.boundary = len(self.nodes)
