"""Which parameters train where the model's own are frozen: LoRA's adapters, and modules trained whole."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from memcalc.estimation.remembered import remembered
from memcalc.spec.finetuning import ATTENTION_TARGETS, MLP_TARGETS, LoraSpec, QloraSpec, adapted_modules, packing_dtype
from memcalc.spec.model import ModelSpec
from memcalc.spec.recipes import RECIPES
from memcalc.spec.spec import Spec
from memcalc.spec.training import TrainingSpec


class Quantised(NamedTuple):
    """How matrices are held in 4 bits."""

    block_size: int
    nested: bool  # their scales are quantised as well
    head: bool  # the head too
    storage: str = "uint8"  # dtype of the tensors that they are packed in


class Adapters(NamedTuple):
    """What trains, and what is frozen in 4 bits. Modules by the last part of their names."""

    targets: tuple[str, ...]
    rank: int
    dtype: str
    dropout: float
    saved: tuple[str, ...]  # trained whole
    quantised: Quantised | None
    input_gradient: bool  # the embedding's output needs a gradient
    keeps_inputs: bool = False  # frozen layers, too, keep their input, which no gradient needs

    def holds_in_4_bits(self, module: str) -> bool:
        """Whether a linear layer's matrix is quantised."""
        name = module.rpartition(".")[2]
        if self.quantised is None or name in self.saved:
            return False
        return name in ATTENTION_TARGETS or name in MLP_TARGETS or (name == "lm_head" and self.quantised.head)


@remembered
def adapters_of(spec: Spec) -> Adapters | None:
    """The adapters of a run; None where everything trains."""
    training = spec.training
    if spec.inference is not None:
        return frozen_for(spec.inference.quantization)
    if training.lora is None:
        return None
    found = _adapters(
        training.lora, training.qlora, spec.model, training.implementation, training.dtype, training.recipe
    )
    if found.quantised is not None:
        storage = packing_dtype(training, spec.parallelism)
        found = found._replace(quantised=found.quantised._replace(storage=storage))
    # DeepSpeed 0.19 runtime/zero/linear.py: stage 3 saves input and weight of each layer, whatever trains.
    return found._replace(keeps_inputs=True) if replaces_linears(spec) else found


def replaces_linears(spec: Spec) -> bool:
    """Whether DeepSpeed's stage 3 runs linear layers of its own (runtime/zero/linear.py).

    deepspeed.zero.Init puts them there; matrices in 4 bits are made without it, and split afterwards.
    """
    parallelism = spec.parallelism
    splits = parallelism.engine == "deepspeed" and parallelism.zero_stage == 3 and parallelism.shards > 1
    return splits and spec.training.finetune != "qlora"


@lru_cache(maxsize=8)
def frozen_for(quantization: str) -> Adapters:
    """Of generation: nothing trains, and no adapter stands beside the matrices."""
    # transformers' BitsAndBytesConfig: blocks of 64 elements, scales not quantised, the head left as it is.
    quantised = None if quantization == "none" else Quantised(block_size=64, nested=False, head=False)
    return Adapters((), 0, "", 0.0, (), quantised, input_gradient=False)


@lru_cache(maxsize=256)
def _adapters(
    lora: LoraSpec,
    qlora: QloraSpec | None,
    model: ModelSpec,
    implementation: str,
    dtype: str,
    recipe: str,
) -> Adapters:
    quantised = None
    if qlora is not None:
        head = qlora.quantize_lm_head and not model.tie_word_embeddings
        quantised = Quantised(qlora.block_size, qlora.double_quantization, head)
    return Adapters(
        targets=adapted_modules(lora, model, implementation),
        rank=lora.rank,
        dtype="fp32" if lora.adapter_dtype == "fp32" or RECIPES[recipe].weights == "fp32" else dtype,
        dropout=lora.dropout,
        saved=lora.modules_to_save,
        quantised=quantised,
        input_gradient=lora.input_require_grads or "embed_tokens" in lora.modules_to_save,
    )


def read_dtype(spec: Spec) -> str:
    """The dtype of the weights that modules read: what FSDP2's policy gathers them in, else that of the weights."""
    return spec.parallelism.fsdp.param_dtype or base_dtype(spec.training)


def base_dtype(training: TrainingSpec) -> str:
    """The dtype of the weights that are held: the recipe's, or what the frozen base is held in."""
    if training.lora is not None:
        return "fp32" if training.lora.base_dtype == "fp32" else training.dtype
    weights = RECIPES[training.recipe].weights
    return training.dtype if weights == "compute" else weights
