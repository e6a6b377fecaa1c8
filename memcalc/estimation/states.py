"""Weights, master weights, gradients and optimizer states: which copies exist, how large on one rank, and when.

The recipe table (memcalc/spec/recipes.py) says which copies and when; `sharding` says how large; the optimizer's
states are those of torch.optim (2.13) and bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from memcalc.estimation.adapters import base_dtype
from memcalc.estimation.allocation import rounded, unsplit_tails
from memcalc.estimation.engines.gradient_buffer import buffer_sizes, lies_in_a_buffer, shard_sizes
from memcalc.estimation.items import BIT, Item, from_phase, mask_of
from memcalc.estimation.rows import write_rows
from memcalc.estimation.sharding import Held, Parameters, shard_shape, stage_parameters
from memcalc.estimation.stages import Stage
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Rows
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES
from memcalc.spec.spec import Spec

ZERO = "ZeRO (arXiv 1910.02054) section 3"

# Below this many elements bitsandbytes keeps a state in fp32 (bitsandbytes optim/optimizer.py, min_8bit_size).
MIN_8BIT_ELEMENTS = 4096
# One fp32 scale for each block of 256 elements of an 8-bit state (bitsandbytes functional.py, blockwise quantisation).
QUANTISATION_BLOCK = 256


class Copy(NamedTuple):
    """One copy of every parameter of a rank: what for, in which dtype, from which ZeRO stage on sharded, and when."""

    component: Component
    name: str
    dtype: str
    sharded_from_stage: int
    mask: int
    citation: str


class Choice(NamedTuple):
    """What the states depend on, apart from the parameters themselves."""

    recipe: str
    compute: str
    optimizer: str
    optimizer_implementation: str
    zeroes_gradients: bool
    accumulates: bool
    zero_stage: int
    data_parallel: int  # the ranks over which ZeRO shards
    expert_shards: int  # and those over which it shards routed experts
    engine: str
    base: str  # dtype of the weights that forward reads
    torch: tuple[int, int] = (2, 13)
    mixed_policy: bool = False  # FSDP2 gathers in the compute dtype what it holds in fp32, and reduces in fp32

    @property
    def partitions_gradients(self) -> bool:
        """Whether DeepSpeed takes every gradient as it arrives, and keeps a share of what it has reduced."""
        return self.engine == "deepspeed" and self.zero_stage >= 1 and self.data_parallel > 1

    @property
    def masters_follow_flattening(self) -> bool:
        """Whether DeepSpeed's stages 1 and 2 need most while weights are flattened, before there are masters.

        The weights once more against 4P/N of masters and 4P/N of zeros: in 16 bit with more than four ranks.
        """
        later = 8 if RECIPES[self.recipe].master else 4
        more = DTYPE_BYTES[weight_dtype(self)] * self.data_parallel > later
        return self.partitions_gradients and self.zero_stage < 3 and more

    def ranks(self, held: Held, from_stage: int) -> int:
        """The ranks that share one copy of a parameter, which is sharded from a ZeRO stage on."""
        if self.zero_stage < from_stage:
            return 1
        return self.expert_shards if held.routed else self.data_parallel


def choice_of(spec: Spec) -> Choice:
    """The choice of a run."""
    return Choice(
        spec.training.recipe,
        spec.training.dtype,
        spec.training.optimizer,
        spec.training.optimizer_implementation,
        spec.training.zero_grad == "zero",
        spec.training.gradient_accumulation_steps > 1,
        spec.parallelism.zero_stage,
        spec.parallelism.shards,
        spec.parallelism.expert_shards,
        spec.parallelism.engine,
        base_dtype(spec.training),
        spec.training.torch,
        spec.training.implementation == "torchtitan" and spec.parallelism.engine == "fsdp2",
    )


def groups(parameters: Parameters, choice: Choice) -> Iterator[tuple[Parameters, Choice, bool]]:
    """Parameters that are held alike, the choice with their dtype, and whether they train."""
    found: dict[tuple[str, bool], list[Held]] = {}
    for held in parameters:
        found.setdefault((held.dtype, held.trains), []).append(held)
    if len(found) == 1 and ("", True) in found:
        yield parameters, choice, True
        return
    for (dtype, trains), rows in found.items():
        own = choice._replace(base=dtype, compute=dtype) if dtype else choice
        yield Parameters(rows), own, trains


def state_rows(spec: Spec, stage: Stage) -> Rows:
    """All that is held through several phases, parameter by parameter."""
    return _state_rows(stage_parameters(spec, stage), choice_of(spec))


@lru_cache(maxsize=1024)
def _state_rows(parameters: Parameters, choice: Choice) -> Rows:
    items: list[Item] = []
    tails: dict[int, int] = {}
    for group, own, trains in groups(parameters, choice):
        items += _group_items(group, own, trains=trains)
        for mask, amount in _tails(group, own, trains=trains).items():
            tails[mask] = tails.get(mask, 0) + amount
    return write_rows(items, "model states", tails)


def _group_items(parameters: Parameters, choice: Choice, *, trains: bool) -> Iterator[Item]:
    for copy in _copies(choice):
        if trains or copy.component is Component.WEIGHTS:
            from_stage = copy.sharded_from_stage
            yield from (_item(copy, held, choice.ranks(held, from_stage), choice.engine) for held in parameters)
    if not trains:
        return
    for held in parameters:
        yield from _optimizer_states(held, choice.ranks(held, 1), choice)
    yield from _step_temporaries(parameters, choice)


# Tails repeat from layer to layer; beyond this many layers the rest is taken as their average.
SIMULATED_LAYERS = 128


def _tails(parameters: Parameters, choice: Choice, *, trains: bool) -> dict[int, int]:
    """Bytes by phase mask of the rests that blocks keep, see `allocation.unsplit_tails`.

    Weights, masters and what else is made before the first step follow one another, parameter after parameter: that
    is exact. Later copies find blocks that activations have left behind, which the free lists of a moment decide: no
    formula knows them, and as near as one comes is to take each as made on an empty device (docs/accuracy.md).
    """
    tails: dict[int, int] = {}
    layers = max((held.count for held in parameters if held.where == "layer"), default=0)
    simulated = min(layers, SIMULATED_LAYERS)
    built: list[Copy] = []
    sizes: list[list[int]] = []
    for copy in _long_lived(choice):
        if not trains and copy.component is not Component.WEIGHTS:
            continue
        from_stage = copy.sharded_from_stage
        if choice.zero_stage >= from_stage and choice.data_parallel > 1 and choice.engine == "deepspeed":
            continue  # flat buffers: one tail at most
        built.append(copy)
        if choice.engine == "megatron" and lies_in_a_buffer(copy.component, choice.zero_stage):
            sizes.append(buffer_sizes(parameters, copy.dtype))
        elif choice.engine == "megatron" and choice.zero_stage:
            sizes.append(shard_sizes(parameters, copy.dtype, choice.data_parallel, choice.expert_shards))
        else:
            sizes.append(_sizes(parameters, copy.dtype, choice, from_stage, simulated))
    first = [i for i, copy in enumerate(built) if copy.mask & BIT["zero_grad_1"]]
    amounts = dict(zip(first, unsplit_tails(*(sizes[i] for i in first)), strict=True))
    for i, copy in enumerate(built):
        amount = amounts[i] if i in amounts else unsplit_tails(sizes[i])[0]
        repeats = layers > simulated and choice.engine != "megatron"
        tails[copy.mask] = tails.get(copy.mask, 0) + (amount * layers // simulated if repeats else amount)
    return tails


def _sizes(parameters: Parameters, dtype: str, choice: Choice, from_stage: int, layers: int) -> list[int]:
    """Bytes of every tensor of one copy, in the order in which a model is built; of `layers` layers."""
    sizes: dict[str, list[int]] = {"embedding": [], "layer": [], "head": []}
    for held in parameters:
        size = DTYPE_BYTES[dtype]
        for extent in shard_shape(held.shape, choice.ranks(held, from_stage), choice.engine):
            size *= extent
        sizes[held.where].append(size)
    return [*sizes["embedding"], *(sizes["layer"] * layers), *sizes["head"]]


def _long_lived(choice: Choice) -> Iterator[Copy]:
    """Every copy of the parameters that is a list of tensors of their sizes."""
    yield from _copies(choice)
    recipe = RECIPES[choice.recipe]
    dtype = choice.compute if recipe.moments == "compute" else recipe.moments
    moments = {"adam": 2, "adamw": 2, "momentum": 1, "lion": 1}.get(choice.optimizer, 0)
    for _ in range(moments):
        yield Copy(Component.OPTIMIZER_STATE, "", dtype, 1, from_phase("optimizer_step_1"), "")
    if choice.optimizer_implementation == "foreach" and choice.optimizer in ("adam", "adamw", "lion"):
        step = mask_of("optimizer_step_1", "optimizer_step_2")
        yield Copy(Component.TEMPORARIES, "", recipe.master or weight_dtype(choice), 1, step, "")


def _copies(choice: Choice) -> Iterator[Copy]:
    recipe = RECIPES[choice.recipe]
    # FSDP2 shards them always: its stage 2 keeps what it has gathered from forward to backward.
    weights_from = 2 if choice.engine == "fsdp2" else 3
    citation = "the parameters that forward reads"
    yield Copy(Component.WEIGHTS, "", weight_dtype(choice), weights_from, from_phase("model"), citation)
    if recipe.master is not None:
        citation = f"{ZERO}.1: an fp32 copy that the optimizer updates"
        made = "input" if choice.masters_follow_flattening else "optimizer"
        yield Copy(Component.MASTER_WEIGHTS, " master", recipe.master, 1, from_phase(made), citation)
    gradients_from = 1 if choice.engine == "deepspeed" else 2  # its stage 1 reduces and frees them as stage 2 does
    if recipe.gradients is not None:
        yield Copy(
            Component.GRADIENTS,
            " gradient",
            weight_dtype(choice),
            gradients_from,
            _gradient_mask(choice),
            "autograd: .grad, from backward to zero_grad",
        )
    if recipe.main_gradients is not None:
        mask = {
            "always": from_phase("optimizer"),
            "backward": _gradient_mask(choice),
            "step": mask_of("optimizer_step_1", "optimizer_step_2"),
        }[recipe.main_gradients_live]
        sharded_from = 1 if recipe.main_gradients_live == "step" else gradients_from
        citation = f"recipe {choice.recipe} ({recipe.imitates}): an fp32 copy of the gradients"
        yield Copy(Component.GRADIENTS, " gradient in fp32", recipe.main_gradients, sharded_from, mask, citation)


def _gradient_mask(choice: Choice) -> int:
    """Gradients that are held as a whole: in the optimizer step and at the next zero_grad, and in between if kept.

    The backward that makes them is evaluated moment by moment (timeline.py), unless they exist before it starts.
    """
    if choice.partitions_gradients and choice.zero_stage == 3:
        return from_phase("optimizer")  # stage3.py: one flat buffer of the rank's share, made once
    mask = mask_of("optimizer_step_1", "optimizer_step_2")
    if not choice.partitions_gradients:  # DeepSpeed frees them at the end of its step
        mask |= mask_of("zero_grad_2")
    if choice.accumulates:
        mask |= mask_of("forward_1", "loss_1", "backward_1", "forward_2", "loss_2", "backward_2")
    if choice.zeroes_gradients and not choice.partitions_gradients:
        mask |= mask_of("forward_2", "loss_2", "backward_2")
    return mask


def weight_dtype(choice: Choice) -> str:
    """The dtype of the weights that forward reads."""
    return choice.base


def _item(copy: Copy, held: Held, ranks: int, engine: str) -> Item:
    shape = shard_shape(held.shape, ranks, engine)
    item_bytes = DTYPE_BYTES[copy.dtype]
    each = item_bytes
    for size in shape:
        each *= size
    formula = f"{item_bytes}·{held.formula}" + ("/N" if ranks > 1 else "")
    return Item(
        copy.component,
        held.module,
        held.tensor + copy.name,
        shape,
        copy.dtype,
        held.count,
        each,
        rounded(each),
        copy.mask,
        formula,
        copy.citation,
    )


def _optimizer_states(held: Held, ranks: int, choice: Choice) -> Iterator[Item]:
    """States appear at the first step and stay (torch.optim: lazily, parameter by parameter)."""
    recipe = RECIPES[choice.recipe]
    dtype = choice.compute if recipe.moments == "compute" else recipe.moments
    mask = from_phase("optimizer_step_1")

    def state(name: str, citation: str, state_dtype: str = dtype) -> Copy:
        return Copy(Component.OPTIMIZER_STATE, f" {name}", state_dtype, 1, mask, citation)

    optimizer, engine = choice.optimizer, choice.engine
    if optimizer in ("adam", "adamw"):
        source = "Adam (arXiv 1412.6980); torch.optim: two moments in the parameter's dtype"
        for name in ("first moment", "second moment"):
            yield _item(state(name, source), held, ranks, engine)
        if choice.optimizer_implementation == "fused" and engine != "megatron":  # its own counts on the host
            counter = Held(held.module, held.tensor, (("1", 1),), held.count, held.where)
            source = "torch.optim fused: the step counter of each parameter is on the device"
            yield _item(state("step counter", source, "fp32"), counter, 1, engine)
    elif optimizer in ("momentum", "lion"):
        source = "torch.optim.SGD: momentum buffer" if optimizer == "momentum" else "Lion (arXiv 2302.06675)"
        yield _item(state("momentum", source), held, ranks, engine)
    elif optimizer == "adafactor":
        yield from _factored(held, ranks, choice, state("", "Adafactor (arXiv 1804.04235) section 3", dtype))
    elif optimizer == "adam-8bit":
        yield from _eight_bit(held, ranks, choice, mask)


def _factored(held: Held, ranks: int, choice: Choice, copy: Copy) -> Iterator[Item]:
    """Row and column means of the squared gradient for matrices, the whole square for vectors."""
    if len(held.axes) < 2:
        yield _item(copy._replace(name=" variance"), held, ranks, choice.engine)
        return
    *leading, rows, columns = held.axes
    for name, axes in (("row variance", (*leading, rows)), ("column variance", (*leading, columns))):
        factor = Held(held.module, held.tensor, tuple(axes), held.count, held.where)
        yield _item(copy._replace(name=f" {name}"), factor, ranks, choice.engine)


def _eight_bit(held: Held, ranks: int, choice: Choice, mask: int) -> Iterator[Item]:
    """Two moments of one byte, and an fp32 scale for each block of 256; small tensors stay fp32."""
    source = "8-bit optimizers (arXiv 2110.02861) section 2; bitsandbytes optim/optimizer.py"
    share = shard_shape(held.shape, ranks, choice.engine)
    elements = 1
    for size in share:
        elements *= size
    small = elements < MIN_8BIT_ELEMENTS
    for name in ("first moment", "second moment"):
        dtype = "fp32" if small else "uint8"
        copy = Copy(Component.OPTIMIZER_STATE, f" {name}", dtype, 1, mask, source)
        yield _item(copy, held, ranks, choice.engine)
        if not small:
            blocks = -(-elements // QUANTISATION_BLOCK)
            scales = Held(held.module, held.tensor, (("n/256", blocks),), held.count, held.where)
            scale = Copy(Component.OPTIMIZER_STATE, f" {name} scales", "fp32", 1, mask, source)
            yield _item(scale, scales, 1, choice.engine)


def _step_temporaries(parameters: Parameters, choice: Choice) -> Iterator[Item]:
    """What the update makes and drops inside the step (torch.optim 2.13; allocators of the CUDA build agree).

    foreach makes a list of tensors as large as all parameters at once (Adam: the square roots of the second moments);
    for-loop one parameter at a time, where the previous one's denominator lives until the next is built; fused nothing.
    """
    recipe = RECIPES[choice.recipe]
    optimized = recipe.master or weight_dtype(choice)
    mask = mask_of("optimizer_step_1", "optimizer_step_2")
    optimizer, how = choice.optimizer, choice.optimizer_implementation
    if how == "fused" or optimizer in ("sgd", "momentum", "adam-8bit"):
        return
    if optimizer in ("adam", "adamw", "lion") and how == "foreach":
        what = "sqrt of second moment" if optimizer != "lion" else "update"
        citation = f"torch/optim/{optimizer}.py, foreach: one list of tensors for all parameters"
        copy = Copy(Component.TEMPORARIES, f" {what}", optimized, 1, mask, citation)
        yield from (_item(copy, held, choice.ranks(held, 1), choice.engine) for held in parameters)
        return
    if optimizer == "adafactor" and how == "foreach":
        citation = "torch/optim/_adafactor.py, foreach: the updates of all parameters"
        copy = Copy(Component.TEMPORARIES, " update", optimized, 1, mask, citation)
        yield from (_item(copy, held, choice.ranks(held, 1), choice.engine) for held in parameters)
        return
    largest = max(parameters, key=lambda held: held.elements)
    citation = f"torch/optim/{optimizer}.py, for-loop: two buffers of the largest parameter"
    copy = Copy(Component.TEMPORARIES, " update buffers", optimized, 1, mask, citation)
    yield _item(copy, largest._replace(count=2), choice.ranks(largest, 1), choice.engine)


def gradients_exist(choice: Choice, step: int) -> bool:
    """Whether gradients exist, whole, before the (last micro-batch's) backward of a step starts."""
    return bool(_gradient_mask(choice) & BIT[f"loss_{step}"])
