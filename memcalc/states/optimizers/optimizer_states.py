"""Optimizer states, parameter by parameter.

States are created in the first step (torch.optim: lazily), Adagrad's with the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.layout.parameters import Axis
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, from_phase
from memcalc.states.optimizers.step_buffers import BLOCK_4BIT
from memcalc.states.optimizers.update_rule import UpdateRule
from memcalc.states.parameter_copies import UNSHARDED, ParameterCopy, ShardCounts, copy_row

# bitsandbytes keeps states with fewer elements in fp32 (bitsandbytes optim/optimizer.py, min_8bit_size).
MIN_8BIT_ELEMENTS = 4096
# One fp32 scale per block of 256 elements of an 8-bit state (bitsandbytes functional.py, blockwise quantization).
QUANTIZATION_BLOCK = 256
# A paged optimizer keeps states with fewer elements on the GPU (bitsandbytes optim/optimizer.py, get_state_buffer).
MIN_PAGED_ELEMENTS = 100_000
# torchao 0.18 optim/adam.py: 4-bit states in blocks of 128; tensors below 4096 elements, or not divisible, stay
# unpacked.
VALUES_8BIT, VALUES_4BIT = 256, 16  # values of a quantized state: the entries of its fp32 map

ADAM = "Adam (arXiv 1412.6980); torch.optim: two moments in the parameter's dtype"
BITSANDBYTES = "8-bit optimizers (arXiv 2110.02861) section 2; bitsandbytes optim/optimizer.py"
TORCHAO = "4-bit optimizers (arXiv 2309.01507); torchao 0.18 optim/subclass_4bit.py"
GALORE = "GaLore (arXiv 2403.03507) section 4; galore_torch 1.0 adamw.py, galore_projector.py"

# torch.optim 2.13, <file>.py, _init_group: names of the states that have the parameter's size and dtype.
WHOLE: dict[str, tuple[tuple[str, ...], str]] = {
    "momentum": (("momentum",), "torch.optim.SGD: momentum buffer"),
    "adam": (("first moment", "second moment"), ADAM),
    "adamw": (("first moment", "second moment"), ADAM),
    "adagrad": (("sum of squares",), "torch.optim.Adagrad (JMLR 12, 2011): made with the optimizer"),
    "adadelta": (("mean square", "mean squared update"), "torch.optim.Adadelta (arXiv 1212.5701)"),
    "adamax": (("first moment", "infinity norm"), "torch.optim.Adamax (arXiv 1412.6980 section 7.1)"),
    "nadam": (("first moment", "second moment"), "torch.optim.NAdam (Dozat 2016)"),
    "radam": (("first moment", "second moment"), "torch.optim.RAdam (arXiv 1908.03265)"),
    "rmsprop": (("mean square",), "torch.optim.RMSprop (Hinton's lecture 6)"),
    "rprop": (("last gradient", "step size"), "torch.optim.Rprop (Riedmiller, Braun 1993)"),
    "asgd": (("running mean",), "torch.optim.ASGD (Polyak, Juditsky 1992)"),
    "lion": (("momentum",), "Lion (arXiv 2302.06675)"),
    "lamb": (("first moment", "second moment"), "LAMB (arXiv 1904.00962); bitsandbytes 0.50 optim/lamb.py: in fp32"),
}


class OptimizerState(NamedTuple):
    """A state of one parameter."""

    item: RowDraft  # the state on one rank
    paged: bool  # whether it is in unified memory, outside PyTorch's allocator
    parameter: LocalParameter  # its parameter
    # whether a step computes a new tensor and frees the old one, rather than updating it in place
    replaced: bool = False


def is_hidden_matrix(parameter: LocalParameter) -> bool:
    """Return whether a parameter is a 2D weight of a layer, which Muon updates and GaLore projects.

    Embeddings, LM head and vectors are not.
    """
    return parameter.where == "layer" and len(parameter.axes) == 2


def unsharded_states(update: UpdateRule) -> tuple[str, ...]:
    """Return the names of the states that are as large as the parameters."""
    names, _ = WHOLE.get(update.optimizer, ((), ""))
    if update.amsgrad:
        names = (*names, "highest second moment")
    if update.centered:
        names = (*names, "mean gradient")
    if update.optimizer == "rmsprop" and update.momentum:
        names = (*names, "momentum")
    return names


def replaces_states(update: UpdateRule) -> bool:
    """Return whether the optimizer has a state that each step replaces, rather than updating it in place."""
    return update.optimizer == "galore"


def state_dtype(update: UpdateRule) -> str:
    """Return the dtype of states: the parameter's in torch, fp32 in bitsandbytes and transformers."""
    return "fp32" if update.paged or update.optimizer in ("lamb", "adafactor-hf") else update.moments


def first_phase(update: UpdateRule) -> str:
    """Return the phase in which states are created."""
    return "optimizer" if update.optimizer == "adagrad" else "optimizer_step_1"


def optimizer_states(parameters: LocalParameters, update: UpdateRule, shards: ShardCounts) -> Iterator[OptimizerState]:
    """Yield every optimizer state of a rank."""
    for held in parameters:
        yield from own_states(held, update, shards)
    yield from shared_states(parameters, update, shards)


def own_states(parameter: LocalParameter, update: UpdateRule, shards: ShardCounts) -> Iterator[OptimizerState]:
    """Yield the states of one parameter."""
    optimizer = update.optimizer
    if optimizer == "muon":
        hidden = is_hidden_matrix(parameter)
        names = ("momentum",) if hidden else ("first moment", "second moment")
        citation = "Muon (arXiv 2502.16982); torch.optim.Muon" if hidden else f"with Muon, {ADAM}"
        yield from (_state(parameter, name, update.moments, citation, update, shards) for name in names)
    elif optimizer in ("adafactor", "adafactor-hf"):
        yield from _factored(parameter, update, shards)
    elif optimizer in ("adam-8bit", "lion-8bit"):
        yield from _eight_bit(parameter, update, shards)
    elif optimizer == "adam-4bit":
        yield from _four_bit(parameter, update, shards)
    elif optimizer == "galore":
        yield from _projected(parameter, update)
    else:
        citation = f"{WHOLE[optimizer][1]}" if optimizer in WHOLE else ""
        if update.paged:
            citation = f"bitsandbytes 0.50 optim/{optimizer}.py, paged: in fp32"
        paged = update.paged and _share(parameter, shards) >= MIN_PAGED_ELEMENTS
        for name in unsharded_states(update):
            yield _state(parameter, name, state_dtype(update), citation, update, shards, paged=paged)
    yield from _scalars(parameter, update, shards)


def _state(
    parameter: LocalParameter,
    name: str,
    dtype: str,
    citation: str,
    update: UpdateRule,
    shards: ShardCounts = UNSHARDED,
    *,
    axes: tuple[Axis, ...] | None = None,
    paged: bool = False,
) -> OptimizerState:
    """Return a state of a parameter, with the axes of the parameter or `axes`; the default is whole on each rank."""
    shaped = parameter
    if axes is not None:
        shaped = LocalParameter(parameter.module, parameter.tensor, axes, parameter.count, parameter.where)
    mask = from_phase(first_phase(update))
    # torch/optim/sgd.py: torch.clone(grad), unsharded where the gradient is; with decay a new tensor.
    cloned = update.optimizer == "momentum" and not update.decays
    copy = ParameterCopy(Component.OPTIMIZER_STATE, f" {name}", dtype, 1, mask, citation, gradient_shaped=cloned)
    return OptimizerState(copy_row(copy, shaped, shards), paged, parameter)


def _share(parameter: LocalParameter, shards: ShardCounts) -> int:
    """Return the number of elements in a rank's shard."""
    return prod(shards.shape(parameter))


def _scalars(parameter: LocalParameter, update: UpdateRule, shards: ShardCounts) -> Iterator[OptimizerState]:
    """Yield the scalars kept on the device, one per parameter."""
    names: tuple[str, ...] = ()
    citation = "torch.optim fused: the step counter of each parameter is on the device"
    fused = update.implementation == "fused" and shards.engine != "megatron"  # Megatron-LM counts its steps on the host
    if fused and update.optimizer in ("adam", "adamw", "adagrad", "muon"):
        names = () if update.optimizer == "muon" and is_hidden_matrix(parameter) else ("step counter",)
    elif update.optimizer == "asgd":
        names, citation = ("step counter", "eta", "mu"), "torch/optim/asgd.py 2.13: on the device"
    elif update.optimizer == "adafactor-hf":
        names, citation = ("root mean square",), "transformers 5.23 optimization.py: of the weight, on the device"
    elif update.optimizer == "lamb":
        names, citation = ("update norm",), "bitsandbytes 0.50 optim/optimizer.py: unorm_vec"
    for name in names:
        yield _state(parameter, name, "fp32", citation, update, axes=(("1", 1),))


def _factored(parameter: LocalParameter, update: UpdateRule, shards: ShardCounts) -> Iterator[OptimizerState]:
    """Yield Adafactor's states: for a matrix row and column means of the squared gradient, for a vector all of it."""
    citation = "Adafactor (arXiv 1804.04235) section 3"
    if len(parameter.axes) < 2:
        yield _state(parameter, "variance", state_dtype(update), citation, update, shards)
        return
    *leading, rows, columns = parameter.axes
    for name, axes in (("row variance", (*leading, rows)), ("column variance", (*leading, columns))):
        yield _state(parameter, name, state_dtype(update), citation, update, shards, axes=tuple(axes))


def _eight_bit(parameter: LocalParameter, update: UpdateRule, shards: ShardCounts) -> Iterator[OptimizerState]:
    """Yield 8-bit states: one byte per element, an fp32 scale per block of 256; small tensors stay in fp32.

    Embeddings stay in fp32 if requested.
    """
    elements = _share(parameter, shards)
    wide = not _in_eight_bits(parameter, update, shards)
    paged = update.paged and elements >= MIN_PAGED_ELEMENTS
    for name in _quantized(update):
        dtype = "fp32" if wide else "uint8"
        yield _state(parameter, name, dtype, BITSANDBYTES, update, shards, paged=paged)
    if wide:
        return
    blocks = -(-elements // QUANTIZATION_BLOCK)
    for name in _quantized(update):  # bitsandbytes 0.50 optim/optimizer.py, init_state: after both states
        yield _state(parameter, f"{name} scales", "fp32", BITSANDBYTES, update, axes=(("n/256", blocks),))


def _in_eight_bits(parameter: LocalParameter, update: UpdateRule, shards: ShardCounts) -> bool:
    table = parameter.module in ("embed_tokens", "embed_positions")
    return _share(parameter, shards) >= MIN_8BIT_ELEMENTS and not (update.embeddings_32bit and table)


def _quantized(update: UpdateRule) -> tuple[str, ...]:
    return ("momentum",) if update.optimizer == "lion-8bit" else ("first moment", "second moment")


def shared_states(parameters: LocalParameters, update: UpdateRule, shards: ShardCounts) -> Iterator[OptimizerState]:
    """Yield the fp32 maps of 8-bit codes: bitsandbytes has one for signed and one for unsigned states."""
    if update.optimizer not in ("adam-8bit", "lion-8bit"):
        return
    if any(_in_eight_bits(held, update, shards) for held in parameters):
        maps = LocalParameter(
            "optimizer", "quantization", ((str(VALUES_8BIT), VALUES_8BIT),), len(_quantized(update)), "embedding"
        )
        yield _state(maps, "map", "fp32", BITSANDBYTES, update)


def is_in_four_bits(elements: int) -> bool:
    """Return whether torchao stores moments of this number of elements in 4 bits (0.18 optim/adam.py, _new_buffer)."""
    return elements >= MIN_8BIT_ELEMENTS and elements % BLOCK_4BIT == 0


def _four_bit(parameter: LocalParameter, update: UpdateRule, shards: ShardCounts) -> Iterator[OptimizerState]:
    """Yield 4-bit states: half a byte per element, an fp32 scale per block of 128, a map; small ones stay unpacked."""
    elements = _share(parameter, shards)
    packed = is_in_four_bits(elements)
    for name in ("first moment", "second moment"):
        if not packed:
            yield _state(parameter, name, update.moments, TORCHAO, update, shards)
            continue
        yield _state(parameter, name, "uint8", TORCHAO, update, axes=(("n/2", elements // 2),))
        scales = (("n/128", elements // BLOCK_4BIT),)
        yield _state(parameter, f"{name} scales", "fp32", TORCHAO, update, axes=scales)
        yield _state(parameter, f"{name} map", "fp32", TORCHAO, update, axes=(("16", VALUES_4BIT),))


def _projected(parameter: LocalParameter, update: UpdateRule) -> Iterator[OptimizerState]:
    """Yield Adam's moments of the projected gradient, and GaLore's projector, which spans the shorter side."""
    if not is_hidden_matrix(parameter):
        for name in ("first moment", "second moment"):
            yield _state(parameter, name, update.moments, GALORE, update)
        return
    short, long = sorted(parameter.axes, key=lambda axis: axis[1])
    rank = ("r", min(update.rank, short[1]))
    for name in ("first moment", "second moment"):
        yield _state(parameter, name, update.moments, GALORE, update, axes=(long, rank))
    # In fp32 the projector is a view of all singular vectors, which stay live; a bf16 or fp16 copy holds r of them.
    kept = (short, short) if update.dtype == "fp32" else (rank, short)
    yield _state(parameter, "projector", update.dtype, GALORE, update, axes=kept)._replace(
        replaced=replaces_states(update)
    )
