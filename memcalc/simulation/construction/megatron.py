"""Weights of Megatron-Core's own modules, in the order in which they are allocated (Megatron-LM core_v0.16.1).

The linear layers and the vocabulary's embedding are created on the GPU in the dtype of the weights
(core/tensor_parallel/layers.py). The norms and the positions' embedding are PyTorch's modules: they are created on the
CPU in fp32, move to the GPU with the model (training/training.py, get_model), and are cast one at a time
(core/transformer/module.py, Float16Module).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memcalc.layout.local_parameters import LocalParameter
from memcalc.ledger.row_drafts import from_phase
from memcalc.sharding.engine import is_embedding, is_output
from memcalc.simulation.construction.initial_tensors import InitialTensor, InitialTensors
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.states.state_options import StateOptions


def built_by_megatron(ordered: Sequence[LocalParameter], options: StateOptions) -> Iterator[InitialTensors]:
    """Yield the weights, given all parameters in registration order."""
    size = DTYPE_BYTES[options.base]

    def made(parameters: Sequence[LocalParameter], item_bytes: int) -> tuple[InitialTensor, ...]:
        return tuple(InitialTensor(item_bytes * each.elements, parameter=each) for each in parameters)

    on_gpu = [each for each in ordered if _is_created_on_gpu(each)]
    moved = [each for each in ordered if not _is_created_on_gpu(each)]
    yield InitialTensors(from_phase("model"), made(on_gpu, size))
    casts = made(moved, DTYPE_BYTES["fp32"]) if options.base != "fp32" else ()
    yield InitialTensors(from_phase("model"), made(moved, size), casts)


def _is_created_on_gpu(parameter: LocalParameter) -> bool:
    """Return whether a parameter belongs to a linear layer of Megatron-Core or to the vocabulary's embedding."""
    projects = parameter.module.endswith("_proj") or is_output(parameter)
    return projects or is_embedding(parameter)
