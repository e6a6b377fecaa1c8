"""From a tape to its program: which tensors are saved, and the allocations and frees of forward, loss and backward."""

from __future__ import annotations

from memcalc.ledger.component import Component
from memcalc.programs.autograd import Backward
from memcalc.programs.program import END, START, Program, StorageEvent
from memcalc.programs.tape import Tape, Tensor


def compiled(
    tape: Tape,
    output: Tensor | None,
    *,
    keeps_gradients: bool,
    main_gradient_dtype: str | None,
    update: tuple[str, ...] = (),
    recomputes: bool = False,
    trains: bool = True,
    holds_output: bool = False,
) -> Program:
    """Return the tape as streams of allocations and frees.

    Args:
        tape: the recorded block.
        output: the block's output tensor; None for the LM head, which ends with the loss.
        keeps_gradients: whether a parameter's gradient stays allocated; otherwise it is freed at once because it is
            added to an existing one.
        main_gradient_dtype: dtype of a second copy of each produced gradient (mixed-20), or None.
        update: dtypes of the temporaries, as large as the gradient, of an optimizer that steps within backward.
        recomputes: whether the block is recomputed together with other blocks before its backward.
        trains: whether there is a backward.
        holds_output: whether the output, if it is a leaf, is counted here because the next block does not save it.
    """
    _hold_leaves(tape, None if holds_output else output)
    kept = _kept(tape)
    boundary = tape.boundary or len(tape.nodes)
    live = _start(tape)
    head = () if output is None else (output.storage,)
    forward = [StorageEvent(index, 1, START) for index in live]
    forward += _forward(tape, range(boundary), live, kept | tape.live.region | tape.live.names | set(head))
    loss = _forward(tape, range(boundary, len(tape.nodes)), live, kept | tape.live.region)
    # With offloaded activations, tensors that Python variables reference stay on the GPU; a frozen embedding packs
    # nothing.
    stays = kept | tape.live.names if tape.packed is not None else kept
    forward += [
        StorageEvent(index, -1, END) for index in head if index not in stays
    ]  # the next block counts it as its input
    backward: list[StorageEvent] = []
    reads: dict[str, int] = {}
    checkpoint_end = -1
    if trains:
        engine = Backward(tape, kept, keeps_gradients, main_gradient_dtype, update, recomputes=recomputes)
        backward, reads, checkpoint_end = engine.run(output), engine.reads, engine.checkpoint_end
    saved = {index for node in tape.nodes for index in node.saved} | kept
    storages = tuple(
        storage if storage.component is not None else storage._replace(component=_component(tape, index, saved))
        for index, storage in enumerate(tape.storages)
    )
    read_by = tuple(sorted((index, layers) for index, layers in tape.live.read_by.items() if index in kept))
    return Program(
        storages=storages,
        forward=tuple(forward),
        loss=tuple(loss),
        backward=tuple(backward),
        region=tuple(sorted(tape.live.region - kept)),
        names=tuple(sorted(tape.live.names - kept - tape.live.region)),
        packed=tuple(tape.packed or ()),
        handed=tuple(sorted(tape.live.handed - kept - tape.live.region - tape.live.names)),
        read_by=read_by,
        reads=tuple(reads.items()),
        checkpoint_end=checkpoint_end,
        held=tuple(sorted(tape.live.held.difference(*(node.saved for node in tape.nodes)))),
        output=-1 if output is None else output.storage,
        output_is_leaf=output is not None and output.storage in tape.leaves,
        tied_gradient=tape.gradients.tied,
        tied_sum=tape.gradients.tied_sum,
    )


def _hold_leaves(tape: Tape, output: Tensor | None) -> None:
    """Keep a leaf live until backward has reached its AccumulateGrad node, whichever operator reads it.

    The output is counted by the next block. Source: torch 2.13 torch/csrc/autograd/functions/accumulate_grad.h,
    `variable`.
    """
    for storage, node in tape.leaves.items():
        if output is None or storage != output.storage:
            node.saved = (storage,)


def _start(tape: Tape) -> set[int]:
    """Return the storages that exist when the block's forward begins: its input, and tables made once and kept."""
    made = {index for node in tape.nodes for index in node.allocated}
    entry = set() if tape.entry is None else {tape.entry.storage}
    return entry | tape.live.given | ((tape.live.held | tape.live.names) - made)


def _kept(tape: Tape) -> set[int]:
    """Return the storages live between forward and backward: segment inputs, and tensors saved outside segments."""
    kept = set(tape.live.held)
    inside = tape.checkpoints.inside
    for segment in tape.checkpoints.segments:
        kept.update((*segment.on_device, *segment.saved))
    for position, node in enumerate(tape.nodes):
        if position not in inside:
            kept.update(node.saved)
    return kept


def _component(tape: Tape, index: int, saved: set[int]) -> Component:
    if index in saved:
        return tape.saved_component
    # In the LM head, a tensor of the logits' size belongs to the loss, saved for backward or not.
    in_head = tape.saved_component is Component.LOGITS_AND_LOSS
    if in_head and any(axis.startswith("V") for axis in tape.storages[index].shape):
        return tape.saved_component
    return Component.TEMPORARIES


def _forward(tape: Tape, positions: range, live: set[int], kept: set[int]) -> list[StorageEvent]:
    """Return the events of forward: a storage is freed after its last reader unless it is in `kept`."""
    last_use: dict[int, int] = {}
    inside = tape.checkpoints.inside
    for position in range(len(tape.nodes)):
        node = tape.nodes[position]
        for tensor in (*node.inputs, *node.outputs):
            last_use[tensor.storage] = position
        for index in (*node.referenced_by_caller, *(() if position in inside else node.referenced_by_graph)):
            last_use[index] = position
    events: list[StorageEvent] = []
    for position in positions:
        node, operator = tape.nodes[position], tape.operator(position)
        made = node.allocated_alone if tape.checkpoints.reentrant and position in inside else node.allocated
        new = [index for index in made if index not in live]
        events += [StorageEvent(index, sign, operator) for index in node.forward.staged_first for sign in (1, -1)]
        events += [StorageEvent(index, 1, operator) for index in (*new, *node.forward.temporaries)]
        live.update(new)
        gone = [index for index in sorted(live) if index not in kept and last_use.get(index, position) <= position]
        events += [StorageEvent(index, -1, operator) for index in node.forward.temporaries]
        events += [StorageEvent(index, sign, operator) for index in node.forward.staged_last for sign in (1, -1)]
        events += [StorageEvent(index, -1, operator) for index in gone]
        live.difference_update(gone)
    return events
