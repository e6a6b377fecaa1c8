"""Saved tensors in host memory: torch.autograd.graph.save_on_cpu around a model's forward, on a tape.

Source: torch 2.13 torch/csrc/autograd/saved_variable.cpp: every tensor that an operator saves passes through the
hooks separately, leaves and outputs included. A tensor that two operators save is stored twice, and a view without
its base. checkpoint() has separate hooks inside; its inputs, saved outside, also go to the host.
"""

from __future__ import annotations

from memcalc.programs.tape import OF_THE_HOST, Tape, Tensor

SOURCE = "torch 2.13 torch/autograd/graph.py: save_on_cpu"

COPY = "torch 2.13 aten/src/ATen/native/cuda/Copy.cu: copy_requires_temporaries"


def offload_saved_tensors(tape: Tape, first: Tensor | None, *, frees_tables: bool, pinned: bool) -> None:
    """Move what the tape's forward saves to the host; its backward fetches a copy of each tensor it reads.

    The loss runs after the model's forward and still saves on the device.

    Args:
        tape: the tape, changed in place.
        first: for the embedding, the input of the layers.
        frees_tables: whether tensors shared by layers are freed with the model's forward, as nothing else references
            them.
        pinned: whether into pinned memory, in contiguous order. Tensors with other strides are copied first
            (aten/src/ATen/native/cuda/Copy.cu, copy_requires_temporaries). Pageable copies keep the order.
    """
    packed = tape.packed = []
    if first is not None:
        if frees_tables:
            tape.live.names |= tape.live.held
            tape.live.held.clear()
        # AccumulateGrad references it (compilation.py, _hold_leaves), so there is no copy
        if first.storage in tape.leaves:
            tape.hold(first)
    inside = tape.checkpoints.inside
    boundary = tape.boundary or len(tape.nodes)
    for position, node in enumerate(tape.nodes[:boundary]):
        if position in inside:
            continue
        copies = [(tensor, _copy(tape, tensor, node.name)) for tensor in tape.variables_of(node)]
        packed += [copy for _, copy in copies]
        fetched = tuple(copy for tensor, copy in copies if tensor.storage != OF_THE_HOST)
        node.backward = node.backward._replace(copied_from_host=fetched)
        node.saved = ()
        if pinned:
            strided = [tensor for tensor in tape.variables_of(node) if tensor.strided]
            before = tuple(_staged(tape, t, node.name) for t in strided if t.storage not in node.allocated)
            after = tuple(_staged(tape, t, node.name) for t in strided if t.storage in node.allocated)
            node.forward = node.forward._replace(staged_first=before, staged_last=after)
    for place, segment in enumerate(tape.checkpoints.segments):
        if segment.start < boundary:
            packed += [_copy(tape, tape.full_tensor(index), "checkpoint") for index in segment.inputs]
            tape.checkpoints.segments[place] = segment._replace(inputs_on_host=True)


def _copy(tape: Tape, tensor: Tensor, operator: str) -> int:
    """Return a dense copy of a tensor, even if it is a view."""
    if tensor.storage < 0:
        return tape.store(f"saved by {operator}", tensor.shape, tensor.dtype, SOURCE)
    of = tape.storages[tensor.storage]
    rule = of.rule if tensor.shape == of.shape else None
    return tape.store(f"{of.name}, saved", tensor.shape, tensor.dtype, SOURCE, rule=rule)


def _staged(tape: Tape, tensor: Tensor, operator: str) -> int:
    """Return the contiguous copy of a tensor that is copied to host memory."""
    return tape.store(f"in order, saved by {operator}", tensor.shape, tensor.dtype, COPY)
