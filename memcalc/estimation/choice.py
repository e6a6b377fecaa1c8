"""What the states of a run depend on, apart from the parameters; and which parameters are held alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memcalc.estimation.adapters import adapters_of, base_dtype
from memcalc.estimation.blocks.structure import float8_of
from memcalc.estimation.copies import Spread
from memcalc.estimation.engines.transformer_engine import in_8_bits
from memcalc.estimation.frozen import adapters_follow_the_head
from memcalc.estimation.operators.float8 import Float8
from memcalc.estimation.optimizers.update import Update, update_of
from memcalc.estimation.remembered import remembered
from memcalc.estimation.sharding import Held, Parameters
from memcalc.spec.cards import find_card
from memcalc.spec.kernels import multiprocessors
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES
from memcalc.spec.spec import Spec
from memcalc.workspaces.multiprocessors import Multiprocessors


class Choice(NamedTuple):
    """What the states depend on, apart from the parameters themselves."""

    recipe: str
    compute: str
    gradients: str | None  # what they are summed in, where it is not what the recipe says
    update: Update
    clips: bool
    ema: str
    zeroes_gradients: bool
    keeps_gradients_until_backward: bool  # those of the step before live through the next forward and its loss
    accumulates: bool
    zero_stage: int
    data_parallel: int  # the ranks over which ZeRO shards
    expert_shards: int  # and those over which it shards routed experts
    engine: str
    base: str  # dtype of the weights that forward reads
    card: Multiprocessors
    torch: tuple[int, int] = (2, 13)
    gathered: str = ""  # dtype in which FSDP2 gathers parameters; "": their own
    reduced: str = ""  # and in which it reduces gradients; "": their own
    wraps_ends: bool = False  # the embedding is a unit, and so are final norm and head together
    loss_in_model: bool = False  # the model's forward ends with the loss
    gathers_last_layer_once: bool = False  # it is not resharded after forward
    sums_unsharded: bool = False  # gradients of micro-batches but for the last one are not reduced
    late_adapters: bool = False  # adapters are made when the model is past its largest moment
    offloads: bool = False  # masters, gradients and the optimizer's states are on the host
    weights_on_host: bool = False  # the weights are
    pins: bool = False  # in pinned memory
    recomputes: bool = False  # every layer, where DeepSpeed's stage 3 gathers by the order of modules
    detached: bool = False  # the first layer's input needs no gradient
    replicates: bool = False  # HSDP: there are several groups, which add up what each has reduced
    fp8_weights: bool = False  # Transformer Engine's matrices have weights in 8 bits alone
    held_in: str = ""  # dtype of the weights that are held, where it is not `base`
    refers: bool = False  # a frozen copy of the model is kept beside it
    narrow_gather: Float8 | None = None  # torchao's layers, where FSDP2 gathers their weights in 8 bits

    @property
    def summed(self) -> str:
        """The dtype in which FSDP2 sums unsharded gradients of micro-batches: that in which it reduces them."""
        return self.reduced or self.gathered or self.base

    @property
    def partitions_gradients(self) -> bool:
        """Whether DeepSpeed takes every gradient as it arrives, and keeps a share of what it has reduced."""
        return self.engine == "deepspeed" and self.zero_stage >= 1 and self.data_parallel > 1

    @property
    def reduces_after_backward(self) -> bool:
        """Whether gradients are whole until backward has ended: DeepSpeed's stage 1, which does not overlap them."""
        return self.partitions_gradients and self.zero_stage == 1

    @property
    def masters_follow_flattening(self) -> bool:
        """Whether DeepSpeed's stages 1 and 2 need most while weights are flattened, before there are masters.

        The weights once more against 4P/N of masters and 4P/N of zeros: in 16 bit with more than four ranks.
        """
        later = 8 if RECIPES[self.recipe].master else 4
        more = DTYPE_BYTES[self.base] * self.data_parallel > later
        return self.partitions_gradients and self.zero_stage < 3 and more

    def spread(self, from_stage: int) -> Spread:
        """Of a copy that is sharded from a ZeRO stage on."""
        if self.zero_stage < from_stage:
            return Spread(1, 1, self.engine)
        return Spread(self.data_parallel, self.expert_shards, self.engine)


@remembered
def choice_of(spec: Spec) -> Choice:
    """The choice of a run."""
    training, base, fsdp = spec.training, base_dtype(spec.training), spec.parallelism.fsdp
    recipe, adapters = RECIPES[training.recipe], adapters_of(spec)
    card = None if spec.hardware.gpu is None else find_card(spec.hardware.gpu)
    return Choice(
        training.recipe,
        training.dtype,
        None if training.gradient_dtype in (None, recipe.main_gradients) else training.gradient_dtype,
        update_of(training, base, spec.model.architecture),
        training.gradient_clipping is not None,
        training.ema,
        training.zero_grad == "zero",
        training.zero_grad_before == "backward",
        training.gradient_accumulation_steps > 1,
        spec.parallelism.zero_stage,
        spec.parallelism.shards,
        spec.parallelism.expert_shards,
        # Megatron-Core's modules bring its optimizer and its buffers, also where nothing is split.
        "megatron" if training.implementation == "megatron" else spec.parallelism.engine,
        base,
        multiprocessors(card),
        training.torch,
        fsdp.param_dtype or "",
        fsdp.reduce_dtype or fsdp.param_dtype or "",
        # Tied, they are one unit, which is gathered and reduced when the root is.
        fsdp.wrap == "layers-and-ends" and not spec.model.tie_word_embeddings,
        # transformers' own loss; memcalc's step, and a loop, may compute theirs of the logits.
        training.implementation == "huggingface" and training.framework not in (None, "loop"),
        # torchtitan at ba2469780; later ones wrap the ends.
        training.implementation == "torchtitan" and fsdp.wrap == "layers",
        fsdp.gradient_sync == "last" and training.gradient_accumulation_steps > 1,
        adapters_follow_the_head(spec),
        spec.parallelism.offload in ("optimizer", "all"),
        spec.parallelism.weights_on_host,
        spec.parallelism.offload_pin_memory,
        spec.parallelism.engine == "deepspeed" and spec.parallelism.zero_stage == 3 and training.recompute == "full",
        adapters is not None and not adapters.input_gradient,
        spec.parallelism.data_parallel_replicate > 1,
        training.fp8_params,
        refers=training.reference_model,
        narrow_gather=float8_of(spec) if training.fp8_all_gather else None,
    )


def groups(parameters: Parameters, choice: Choice) -> Iterator[tuple[Parameters, Choice, bool]]:
    """Parameters that are held alike, the choice with their dtype, and whether they train."""
    found: dict[tuple[str, bool], list[Held]] = {}
    for held in parameters:
        found.setdefault((held.dtype, held.trains), []).append(held)
    if len(found) == 1 and ("", True) in found:
        if choice.fp8_weights:  # buffers of their own (Megatron-LM core/distributed/param_and_grad_buffer.py)
            narrow = Parameters(each for each in parameters if in_8_bits(each))
            yield Parameters(each for each in parameters if not in_8_bits(each)), choice, True
            yield narrow, choice._replace(held_in="uint8"), True
            return
        yield parameters, choice, True
        return
    for (dtype, trains), rows in found.items():
        own = choice
        if dtype:
            own = choice._replace(base=dtype, compute=dtype, update=choice.update.of_weights(choice.recipe, dtype))
        yield Parameters(rows), own._replace(late_adapters=own.late_adapters and trains), trains
