"""Optimizer states, parameter by parameter.

States are created in the first step (torch.optim: lazily), Adagrad's with the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from memcalc.estimation.copies import UNSPREAD, Copy, Spread, copy_item
from memcalc.estimation.items import Item, from_phase
from memcalc.estimation.optimizers.buffers import BLOCK_4BIT
from memcalc.estimation.optimizers.update import Update
from memcalc.estimation.parameters import Axis
from memcalc.estimation.sharding import Held, Parameters
from memcalc.ledger.component import Component

# bitsandbytes keeps states with fewer elements in fp32 (bitsandbytes optim/optimizer.py, min_8bit_size).
MIN_8BIT_ELEMENTS = 4096
# One fp32 scale per block of 256 elements of an 8-bit state (bitsandbytes functional.py, blockwise quantization).
QUANTISATION_BLOCK = 256
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


class State(NamedTuple):
    """A state of one parameter.

    Args:
        item: the state on one rank.
        paged: whether it is in unified memory, outside PyTorch's allocator.
        held: the parameter.
    """

    item: Item
    paged: bool
    held: Held


def is_hidden_matrix(held: Held) -> bool:
    """Return whether a parameter is a 2D weight of a layer, which Muon updates and GaLore projects.

    Embeddings, LM head and vectors are not.
    """
    return held.where == "layer" and len(held.axes) == 2


def whole_states(update: Update) -> tuple[str, ...]:
    """Return the names of the states that are as large as the parameters."""
    names, _ = WHOLE.get(update.optimizer, ((), ""))
    if update.amsgrad:
        names = (*names, "highest second moment")
    if update.centered:
        names = (*names, "mean gradient")
    if update.optimizer == "rmsprop" and update.momentum:
        names = (*names, "momentum")
    return names


def state_dtype(update: Update) -> str:
    """Return the dtype of states: the parameter's in torch, fp32 in bitsandbytes and transformers."""
    return "fp32" if update.paged or update.optimizer in ("lamb", "adafactor-hf") else update.moments


def first_phase(update: Update) -> str:
    """Return the phase in which states are created."""
    return "optimizer" if update.optimizer == "adagrad" else "optimizer_step_1"


def optimizer_states(parameters: Parameters, update: Update, spread: Spread) -> Iterator[State]:
    """Yield every optimizer state of a rank."""
    for held in parameters:
        yield from own_states(held, update, spread)
    yield from shared_states(parameters, update, spread)


def own_states(held: Held, update: Update, spread: Spread) -> Iterator[State]:
    """Yield the states of one parameter."""
    optimizer = update.optimizer
    if optimizer == "muon":
        hidden = is_hidden_matrix(held)
        names = ("momentum",) if hidden else ("first moment", "second moment")
        citation = "Muon (arXiv 2502.16982); torch.optim.Muon" if hidden else f"with Muon, {ADAM}"
        yield from (State(_copy(held, name, update.moments, citation, update, spread), False, held) for name in names)
    elif optimizer in ("adafactor", "adafactor-hf"):
        yield from _factored(held, update, spread)
    elif optimizer in ("adam-8bit", "lion-8bit"):
        yield from _eight_bit(held, update, spread)
    elif optimizer == "adam-4bit":
        yield from _four_bit(held, update, spread)
    elif optimizer == "galore":
        yield from _projected(held, update)
    else:
        citation = f"{WHOLE[optimizer][1]}" if optimizer in WHOLE else ""
        if update.paged:
            citation = f"bitsandbytes 0.50 optim/{optimizer}.py, paged: in fp32"
        paged = update.paged and _share(held, spread) >= MIN_PAGED_ELEMENTS
        for name in whole_states(update):
            yield State(_copy(held, name, state_dtype(update), citation, update, spread), paged, held)
    yield from _scalars(held, update, spread)


def _copy(held: Held, name: str, dtype: str, citation: str, update: Update, spread: Spread) -> Item:
    mask = from_phase(first_phase(update))
    # torch/optim/sgd.py: torch.clone(grad), unsharded where the gradient is; with decay a new tensor.
    cloned = update.optimizer == "momentum" and not update.decays
    copy = Copy(Component.OPTIMIZER_STATE, f" {name}", dtype, 1, mask, citation, as_made=cloned)
    return copy_item(copy, held, spread)


def _part(held: Held, name: str, axes: tuple[Axis, ...], dtype: str, citation: str, update: Update) -> Item:
    """Return a state with other axes, replicated on the rank."""
    part = Held(held.module, held.tensor, axes, held.count, held.where)
    return _copy(part, name, dtype, citation, update, UNSPREAD)


def _share(held: Held, spread: Spread) -> int:
    """Return the number of elements in a rank's shard."""
    return prod(spread.shape(held))


def _scalars(held: Held, update: Update, spread: Spread) -> Iterator[State]:
    """Yield the scalars kept on the device, one per parameter."""
    names: tuple[str, ...] = ()
    citation = "torch.optim fused: the step counter of each parameter is on the device"
    fused = update.implementation == "fused" and spread.engine != "megatron"  # Megatron-LM counts its steps on the host
    if fused and update.optimizer in ("adam", "adamw", "adagrad", "muon"):
        names = () if update.optimizer == "muon" and is_hidden_matrix(held) else ("step counter",)
    elif update.optimizer == "asgd":
        names, citation = ("step counter", "eta", "mu"), "torch/optim/asgd.py 2.13: on the device"
    elif update.optimizer == "adafactor-hf":
        names, citation = ("root mean square",), "transformers 5.23 optimization.py: of the weight, on the device"
    elif update.optimizer == "lamb":
        names, citation = ("update norm",), "bitsandbytes 0.50 optim/optimizer.py: unorm_vec"
    for name in names:
        yield State(_part(held, name, (("1", 1),), "fp32", citation, update), False, held)


def _factored(held: Held, update: Update, spread: Spread) -> Iterator[State]:
    """Yield Adafactor's states: for a matrix row and column means of the squared gradient, for a vector all of it."""
    citation = "Adafactor (arXiv 1804.04235) section 3"
    if len(held.axes) < 2:
        yield State(_copy(held, "variance", state_dtype(update), citation, update, spread), False, held)
        return
    *leading, rows, columns = held.axes
    for name, axes in (("row variance", (*leading, rows)), ("column variance", (*leading, columns))):
        factor = Held(held.module, held.tensor, tuple(axes), held.count, held.where)
        yield State(_copy(factor, name, state_dtype(update), citation, update, spread), False, held)


def _eight_bit(held: Held, update: Update, spread: Spread) -> Iterator[State]:
    """Yield 8-bit states: one byte per element, an fp32 scale per block of 256; small tensors stay in fp32.

    Embeddings stay in fp32 if requested.
    """
    elements = _share(held, spread)
    wide = not _in_eight_bits(held, update, spread)
    paged = update.paged and elements >= MIN_PAGED_ELEMENTS
    for name in _quantised(update):
        dtype = "fp32" if wide else "uint8"
        yield State(_copy(held, name, dtype, BITSANDBYTES, update, spread), paged, held)
    if wide:
        return
    blocks = -(-elements // QUANTISATION_BLOCK)
    for name in _quantised(update):  # bitsandbytes 0.50 optim/optimizer.py, init_state: after both states
        yield State(_part(held, f"{name} scales", (("n/256", blocks),), "fp32", BITSANDBYTES, update), False, held)


def _in_eight_bits(held: Held, update: Update, spread: Spread) -> bool:
    table = held.module in ("embed_tokens", "embed_positions")
    return _share(held, spread) >= MIN_8BIT_ELEMENTS and not (update.embeddings_32bit and table)


def _quantised(update: Update) -> tuple[str, ...]:
    return ("momentum",) if update.optimizer == "lion-8bit" else ("first moment", "second moment")


def shared_states(parameters: Parameters, update: Update, spread: Spread) -> Iterator[State]:
    """Yield the fp32 maps of 8-bit codes: bitsandbytes has one for signed and one for unsigned states."""
    if update.optimizer not in ("adam-8bit", "lion-8bit"):
        return
    if any(_in_eight_bits(held, update, spread) for held in parameters):
        maps = Held(
            "optimizer", "quantisation", ((str(VALUES_8BIT), VALUES_8BIT),), len(_quantised(update)), "embedding"
        )
        yield State(_copy(maps, "map", "fp32", BITSANDBYTES, update, UNSPREAD), False, maps)


def is_in_four_bits(elements: int) -> bool:
    """Return whether torchao keeps moments of so many elements in 4 bits (0.18 optim/adam.py, _new_buffer)."""
    return elements >= MIN_8BIT_ELEMENTS and elements % BLOCK_4BIT == 0


def _four_bit(held: Held, update: Update, spread: Spread) -> Iterator[State]:
    """Yield 4-bit states: half a byte per element, an fp32 scale per block of 128, a map; small ones stay unpacked."""
    elements = _share(held, spread)
    packed = is_in_four_bits(elements)
    for name in ("first moment", "second moment"):
        if not packed:
            yield State(_copy(held, name, update.moments, TORCHAO, update, spread), False, held)
            continue
        yield State(_part(held, name, (("n/2", elements // 2),), "uint8", TORCHAO, update), False, held)
        scales = (("n/128", elements // BLOCK_4BIT),)
        yield State(_part(held, f"{name} scales", scales, "fp32", TORCHAO, update), False, held)
        yield State(_part(held, f"{name} map", (("16", VALUES_4BIT),), "fp32", TORCHAO, update), False, held)


def _projected(held: Held, update: Update) -> Iterator[State]:
    """Yield Adam's moments of the projected gradient, and GaLore's projector, which spans the shorter side."""
    if not is_hidden_matrix(held):
        for name in ("first moment", "second moment"):
            yield State(_copy(held, name, update.moments, GALORE, update, UNSPREAD), False, held)
        return
    short, long = sorted(held.axes, key=lambda axis: axis[1])
    rank = ("r", min(update.rank, short[1]))
    for name in ("first moment", "second moment"):
        yield State(_part(held, name, (long, rank), update.moments, GALORE, update), False, held)
    # In fp32 the projector is a view of all singular vectors, which stay live; a bf16 or fp16 copy holds r of them.
    kept = (short, short) if update.dtype == "fp32" else (rank, short)
    yield State(_part(held, "projector", kept, update.dtype, GALORE, update), False, held)
