"""Backward of a tape: the autograd engine's order of allocations and frees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from memcalc.ledger.component import Component
from memcalc.programs.activation_offload import SOURCE
from memcalc.programs.program import END, FETCH, START, Activity, BlockOperator, StorageEvent
from memcalc.programs.tape import (
    ALIAS,
    CAST,
    IN_PLACE,
    PREPARED,
    REDUCED,
    SAME,
    SCALED,
    SUMMED,
    VIEW,
    CheckpointSegment,
    Node,
    Tape,
    Tensor,
)

UPDATE = "torch.optim: the optimizer's step in a post-accumulate-grad hook of the parameter"


class PendingGradient(NamedTuple):
    """A gradient that waits for its tensor's operator, or for further gradients of the same tensor."""

    storage: int  # its storage
    # whether it is a view, which references its base, so that nothing is accumulated into it in place
    view: bool = False


UNSUMMED = PendingGradient(-1)  # of an input with SUMMED


class Backward:
    """The autograd engine on a tape: operators in reverse order, saved tensors freed after use, gradients summed.

    Source: torch 2.13 torch/csrc/autograd/engine.cpp (evaluate_function) and input_buffer.cpp (accumulate): an
    operator's saved tensors and incoming gradient are released after its outputs exist. A second gradient of a tensor
    is added into the first in place if nothing else references the first and it is neither a view nor a tensor
    subclass; otherwise the sum is a third tensor.

    Args:
        tape: the recorded block.
        kept: storages that are live between forward and backward.
        keeps_gradients: whether a parameter's gradient stays allocated once it is produced.
        main_gradient_dtype: dtype of a second copy of each gradient; None without one.
        update: dtypes of the temporaries, as large as the gradient, of an optimizer that updates each parameter when
            its gradient is complete.
        recomputes: whether the block is recomputed together with other blocks before its backward.
    """

    def __init__(
        self,
        tape: Tape,
        kept: set[int],
        keeps_gradients: bool,
        main_gradient_dtype: str | None,
        update: tuple[str, ...] = (),
        *,
        recomputes: bool = False,
    ) -> None:
        self.tape = tape
        self.recomputes = recomputes
        self.keeps_gradients = keeps_gradients
        self.main_gradient_dtype = main_gradient_dtype
        self.update = update
        self.events: list[StorageEvent] = []
        self.references: dict[int, int] = {}
        self.pending: dict[Tensor, PendingGradient] = {}
        self.stand_ins: dict[int, int] = {}
        self.untouched: dict[CheckpointSegment, list[int]] = {}  # kept results that a recomputation did not reach
        # of a separate backward: the recomputed result and its gradient, which the calling function references
        self.arguments: dict[CheckpointSegment, list[int]] = {}
        self.operator: BlockOperator = START  # the running operator; START for tensors that come from the next block
        self.ends_checkpoint: CheckpointSegment | None = None  # checkpoint that is freed with the running operator
        self.checkpoint_end = -1  # number of events until the first checkpoint is freed
        self.last_unpack = -1  # the operator that unpacks the block's last tensor, in a checkpoint of several blocks
        # tensors shared by all layers -> event at which the first reader has run backward
        self.reads: dict[str, int] = {}
        self.inside = tape.checkpoints.inside
        for index in kept:
            self.references[index] = 0
        for position, node in enumerate(tape.nodes):
            if position not in self.inside:
                self.reference_all(node.saved)
        for segment in tape.checkpoints.segments:
            self.reference_all((*segment.on_device, *segment.saved))
        self.reference_all(tape.live.held)

    def reference_all(self, storages: Iterable[int]) -> None:
        """Add one reference to each of some storages."""
        for index in storages:
            self.references[index] = self.references.get(index, 0) + 1

    def run(self, output: Tensor | None) -> list[StorageEvent]:
        """Return the events of backward, from the gradient of the output (or of the loss) to that of the input."""
        last = output if output is not None else self.tape.nodes[-1].outputs[0]
        if last.grad:
            self.pending[last] = PendingGradient(self.gradient_of(last))
        if output is None:
            self.reference_all(
                [self.pending[last].storage]
            )  # the caller of backward() references the loss gradient until it returns
        if self.tape.entry is None and not self.tape.checkpoints.reentrant:
            self.release_all(self.tape.live.held)  # the first block: no later one reads the shared tables
        recomputed: set[CheckpointSegment] = set()
        nodes = self.tape.nodes
        first_saver = {
            segment: segment.start
            if self.tape.checkpoints.reentrant
            else next((p for p in range(segment.start, segment.stop) if nodes[p].unpacks), segment.start)
            for segment in self.tape.checkpoints.segments
        }
        if self.recomputes and not self.inside:
            self.last_unpack = next((p for p, node in enumerate(nodes) if node.unpacks), -1)
        for position in range(len(self.tape.nodes) - 1, -1, -1):
            segment = self.inside.get(position)
            node = self.tape.nodes[position]
            runs = self.tape.checkpoints.reentrant and any(tensor in self.pending for tensor in node.outputs)
            if segment is not None and segment not in recomputed and (runs or self.unpacks(node)):
                self.recompute(segment)
                recomputed.add(segment)
            self.ends_checkpoint = segment if segment is not None and position == first_saver[segment] else None
            self.operator = self.tape.operator(position)
            self.step(node, takes=self.recomputes or (segment is not None and not self.tape.checkpoints.reentrant))
            if self.ends_checkpoint is not None:  # no gradient has reached it, or its separate backward returns now
                self.end_checkpoint()
        if self.tape.gradients.arrives_summed is not None:
            # The gradient of the tied LM head, which its block counts, is now complete.
            self.references[self.tape.gradients.arrives_summed] = 1
            self.parameter_arrived(self.tape.gradients.arrives_summed)
        if self.tape.entry is not None and self.tape.entry in self.pending:
            self.operator = END
            self.release(self.pending[self.tape.entry].storage)  # the block before counts it as its incoming gradient
        return self.events

    def end_checkpoint(self) -> None:
        """Free a checkpoint and the arguments it holds, once its last tensor has been unpacked."""
        segment, self.ends_checkpoint = self.ends_checkpoint, None
        assert segment is not None
        self.release_all((*segment.on_device, *self.untouched.pop(segment, segment.saved)))
        self.release_all(self.arguments.pop(segment, ()))
        self.checkpoint_end = len(self.events)

    def unpacks(self, node: Node) -> bool:
        """Return whether an operator's backward runs now and unpacks a saved tensor."""
        return node.unpacks and any(tensor in self.pending for tensor in node.outputs)

    def recompute(self, segment: CheckpointSegment) -> None:
        """Recompute a segment, up to its last saved tensor where checkpoints stop early (torch/utils/checkpoint.py).

        A tensor that is still referenced from outside is allocated a second time. A result that the segment has kept is
        taken out of its store, which then no longer references it.
        """
        nodes = self.tape.nodes[segment.start : segment.stop]
        # live until the segment's autocast region ends
        results = nodes[-1].outputs if self.tape.checkpoints.reentrant else ()
        lasting = {index for node in nodes for index in node.saved} | self.tape.live.region
        lasting |= {tensor.storage for tensor in results}
        early = self.tape.checkpoints.stops_early
        last = max((p for p, node in enumerate(nodes) if node.unpacks), default=-1) if early else len(nodes) - 1
        uses: dict[int, int] = {}
        for position, node in enumerate(nodes):
            for tensor in (*node.inputs, *node.outputs):
                uses[tensor.storage] = position
            uses.update(dict.fromkeys((*node.referenced_by_caller, *node.referenced_by_graph), position))
        self.copy_from_host(segment.on_host)
        made_here = {index for node in nodes for index in node.allocated}
        untouched = self.untouched[segment] = [index for index in segment.saved if index in made_here]
        alive = {index for index in segment.saved if index not in made_here}
        for position, node in enumerate(nodes[: last + 1]):
            made = node.allocated
            stops_before_output = early and position == last and not set(node.saved) & set(made)
            if stops_before_output:
                break
            self.operator = self.tape.operator(segment.start + position, Activity.AGAIN)
            self.run_again(node, segment, alive, untouched)
            for index in sorted(alive):
                if index not in lasting and uses.get(index, position) <= position:
                    self.release(self.current(index))
                    alive.discard(index)
        for node in nodes:
            self.reference_all(self.current(index) for index in node.saved)
        if results:
            given = [self.pending[tensor].storage for tensor in results if tensor in self.pending]
            self.arguments[segment] = [*(self.current(tensor.storage) for tensor in results), *given]
            self.reference_all(self.arguments[segment])
        self.release_all(self.current(index) for index in sorted(alive))
        self.release_all(self.current(index) for index in segment.on_host)

    def run_again(self, node: Node, segment: CheckpointSegment, alive: set[int], untouched: list[int]) -> None:
        """Run one operator again, unless the segment has kept all its results."""
        made = node.allocated
        for index in made:
            if index not in alive and index not in segment.inputs:
                if index in segment.saved:
                    untouched.remove(index)
                else:
                    self.recompute_tensor(index)
                alive.add(index)
        if not made or not set(made) <= set(segment.saved):
            for index in node.forward.temporaries:
                self.allocate(index)
            self.release_all(node.forward.temporaries)

    def copy_from_host(self, inputs: Iterable[int]) -> None:
        """Copy a segment's inputs back from the host; the copies replace the originals from here on."""
        self.operator = FETCH
        for index in inputs:
            storage = self.tape.storages[index]
            copy = self.tape.store(f"{storage.name}, fetched", storage.shape, storage.dtype, SOURCE, rule=storage.rule)
            self.stand_ins[index] = copy
            self.allocate(copy)

    def recompute_tensor(self, index: int) -> None:
        """Allocate a storage of a segment again, or a replacement where the first one is still live."""
        if self.references.get(index, 0):
            storage = self.tape.storages[index]
            self.stand_ins[index] = self.tape.store(
                f"{storage.name} again", storage.shape, storage.dtype, storage.citation, rule=storage.rule
            )
        self.allocate(self.current(index))

    def current(self, index: int) -> int:
        """Return the storage that currently replaces `index`, or `index` itself."""
        return self.stand_ins.get(index, index)

    def step(self, node: Node, *, takes: bool) -> None:
        """Run one operator's backward.

        Args:
            node: the operator.
            takes: whether the saved tensors come from a checkpoint's recomputation. They are then freed when the
                operator's backward returns. Only then does the engine cast its results or sum them over broadcast axes
                (torch 2.13 torch/utils/checkpoint.py, unpack_hook; engine.cpp, validate_outputs).
        """
        memory, deferred = node.backward, node.deferred
        incoming = [self.pending.pop(tensor) for tensor in node.outputs if tensor in self.pending]
        if not incoming and node.outputs:
            self.release_all(self.current(index) for index in node.saved)
            return
        outgoing = self.results(node, incoming, takes=takes or bool(memory.copied_from_host))
        if not memory.python_function:
            self.release_all(gradient.storage for gradient in incoming)
        # Gradients enter the buffers of earlier operators before leaves are processed. With a bias the input is
        # flattened before the weight is transposed, so the gradient's view is deposited after the weight (ATen
        # native/Linear.cpp).
        later = [(tensor, gradient) for tensor, gradient in outgoing if memory.input_viewed_first and gradient.view]
        for tensor, gradient in outgoing:
            if (tensor, gradient) not in later:
                self.deposit(tensor, gradient)
        for index in node.parameters[:: -1 if memory.reversed_accumulation else 1]:
            if index not in self.tape.gradients.deferred:
                self.parameter_arrived(index)
        for total, *parts in deferred.sums:
            if not self.references.get(total, 0):
                self.allocate(total)
            self.release_all(parts)
        self.release_all(deferred.drops)
        for index in deferred.completes:
            self.parameter_arrived(index)
        for tensor, gradient in later:
            self.deposit(tensor, gradient)

    def results(
        self, node: Node, incoming: list[PendingGradient], *, takes: bool
    ) -> list[tuple[Tensor, PendingGradient]]:
        """Allocate an operator's input and parameter gradients; return the former in their dtypes and shapes."""
        memory = node.backward
        for index in (*memory.copied_from_host, *(node.parameters if memory.parameters_first else ())):
            self.allocate(index)
        self.allocate_and_free(memory.prepares)
        outgoing = self.outgoing(node, incoming)
        self.allocate_and_free(memory.between)
        early = () if memory.parameters_first else (index for index in node.parameters if index not in memory.summed)
        for index in (*early, *memory.temporaries):
            self.allocate(index)
        self.release_all(memory.temporaries)
        if memory.python_function:
            self.release_all(gradient.storage for gradient in incoming)
        if takes:
            self.release_saved(node)
        outgoing = [(t, self.sum_of(t) if gradient is UNSUMMED else gradient) for t, gradient in outgoing]
        self.allocate_and_free(memory.summed_later)
        self.release_all(_left(node))
        outgoing = self.as_wanted(node, outgoing)
        if not takes:
            self.release_saved(node)
        if self.ends_checkpoint is not None and not self.tape.checkpoints.reentrant:
            self.end_checkpoint()
        elif self.operator.position == self.last_unpack:
            self.checkpoint_end = len(self.events)
        return outgoing

    def outgoing(self, node: Node, incoming: list[PendingGradient]) -> list[tuple[Tensor, PendingGradient]]:
        """Allocate the gradients of an operator's inputs, in order; return them with their tensors."""
        found: list[tuple[Tensor, PendingGradient]] = []
        # Copies from the host are overwritten, too.
        overwritten = iter((*node.saved, *node.backward.copied_from_host))
        prepared = iter(node.backward.prepared)
        early = node.backward.frees_early
        for tensor, kind in zip(node.inputs, node.gradients, strict=True):
            written_over = next(overwritten) if kind == IN_PLACE else None
            if kind is None or not tensor.grad:
                continue
            if kind == SUMMED:
                found.append((tensor, UNSUMMED))
                continue
            if kind == PREPARED:
                found.append((tensor, PendingGradient(next(prepared), view=True)))
                continue
            if kind in (SAME, ALIAS, IN_PLACE):
                source, view = incoming[0] if written_over is None else PendingGradient(self.current(written_over))
                self.references[source] += 1
                found.append((tensor, PendingGradient(source, view or kind == ALIAS)))
                continue
            output = node.outputs[0]
            # An in-place operator's output is its input, perhaps in a lower precision.
            wide = "fp32" if any(each.dtype == "fp32" for each in (output, *node.inputs)) else output.dtype
            if kind == REDUCED:
                made = self.gradient_of(Tensor(tensor.storage, output.shape, wide))
            else:
                made = self.gradient_of(tensor, wide if kind == CAST else tensor.dtype)
            if kind == SCALED:
                unscaled, made = made, self.gradient_of(tensor)
                self.release(unscaled)
            self.release_all(early)
            early = ()
            found.append((tensor, PendingGradient(made, view=kind == VIEW)))
        return found

    def as_wanted(
        self, node: Node, outgoing: list[tuple[Tensor, PendingGradient]]
    ) -> list[tuple[Tensor, PendingGradient]]:
        """Return the gradients in the dtype and shape of their tensors, where the engine casts or sums them.

        The engine follows the order of the operator's arguments; matmuls produce their gradients in the opposite order.
        Source: torch 2.13 torch/csrc/autograd/engine.cpp, validate_outputs.
        """
        kinds = zip(node.inputs, node.gradients, strict=True)
        others = {tensor for tensor, kind in kinds if kind in (CAST, REDUCED)}
        if not others:
            return outgoing
        found: list[tuple[Tensor, PendingGradient]] = []
        for tensor, gradient in reversed(outgoing):
            wanted = PendingGradient(self.as_tensor(gradient.storage, tensor)) if tensor in others else gradient
            found.append((tensor, wanted))
        return found[::-1]

    def as_tensor(self, gradient: int, tensor: Tensor) -> int:
        """Return a gradient summed over broadcast axes, then cast to its tensor's dtype, where either is needed."""
        made = self.tape.storages[gradient]
        if made.dtype != tensor.dtype and made.shape != tensor.shape:
            gradient = self.as_tensor(gradient, Tensor(tensor.storage, tensor.shape, made.dtype))
        wanted = self.gradient_of(tensor)
        self.release(gradient)
        return wanted

    def release_saved(self, node: Node) -> None:
        """Release the tensors that an operator has saved, and record when the shared tables were last read."""
        self.release_all((*(self.current(index) for index in node.saved), *node.backward.copied_from_host))
        self.reads |= dict.fromkeys(node.tables, len(self.events))

    def allocate_and_free(self, steps: Iterable[tuple[int, int]]) -> None:
        """Allocate (sign 1) and free (sign -1) an operator's temporaries in order."""
        for index, sign in steps:
            if sign > 0:
                self.allocate(index)
            else:
                self.release(index)

    def gradient_of(self, tensor: Tensor, dtype: str = "") -> int:
        """Allocate a new storage for the gradient of a tensor; in the tensor's dtype unless another is given."""
        name = f"gradient of {self.tape.storages[tensor.storage].name}"
        shape, citation = tensor.shape, "autograd: the gradient has its tensor's shape"
        index = self.tape.store(name, shape, dtype or tensor.dtype, citation)
        self.allocate(index)
        return index

    def sum_of(self, tensor: Tensor) -> PendingGradient:
        """Allocate a gradient that the engine sums over leading axes; the engine passes on a view of it."""
        return PendingGradient(self.gradient_of(tensor), view=True)

    def parameter_arrived(self, index: int) -> None:
        """Copy, keep or free the complete gradient of a parameter, as the recipe sets."""
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
        gradient = self.tape.storages[index]
        temporaries = [
            self.tape.store(
                f"update by {gradient.name}", gradient.shape, dtype, UPDATE, component=Component.TEMPORARIES
            )
            for dtype in self.update
        ]
        for each in temporaries:
            self.allocate(each)
        self.release_all(temporaries)
        if not self.keeps_gradients:
            self.release(index)

    def deposit(self, tensor: Tensor, gradient: PendingGradient) -> None:
        """Pass a gradient on; a second gradient of the same tensor is added to the first."""
        if tensor not in self.pending:
            self.pending[tensor] = gradient
            return
        first, view = self.pending[tensor]
        if self.references[first] == 1 and not view and not tensor.subclass:
            self.release(gradient.storage)
            return
        total = self.gradient_of(tensor)
        self.release(first)
        self.release(gradient.storage)
        self.pending[tensor] = PendingGradient(total)

    def allocate(self, index: int) -> None:
        """Add a reference; the first one allocates."""
        self.references[index] = self.references.get(index, 0) + 1
        if self.references[index] == 1:
            self.events.append(StorageEvent(index, 1, self.operator))

    def release_all(self, storages: Iterable[int]) -> None:
        """Remove one reference from each of some storages."""
        for index in storages:
            self.release(index)

    def release(self, index: int) -> None:
        """Remove a reference; the last one frees."""
        self.references[index] -= 1
        if self.references[index] == 0:
            self.events.append(StorageEvent(index, -1, self.operator))


def _left(node: Node) -> Iterable[int]:
    """Return the temporaries that an operator has allocated and neither freed nor passed on as gradients."""
    memory = node.backward
    early = ((index, -1) for index in memory.frees_early)
    steps = (*memory.prepares, *early, *memory.between, *memory.summed_later)
    if not steps:
        return ()
    made = Counter(index for index, sign in steps for _ in range(max(sign, 0)))
    made.subtract(index for index, sign in steps if sign < 0)
    made.subtract((*memory.summed, *memory.prepared))
    return made.elements()
