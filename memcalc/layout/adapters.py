"""Trainable parameters of a run with a frozen base model: LoRA adapters and fully trained modules (PEFT)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from memcalc.layout.spec_cache import cached_by_spec
from memcalc.spec.finetuning import (
    ATTENTION_TARGETS,
    LATENT_TARGETS,
    LINEAR_ATTENTION_TARGETS,
    MAMBA_TARGETS,
    MLP_TARGETS,
    QKV,
    LoraSpec,
    QloraSpec,
    adapted_modules,
    base_dtype,
    leaves_packed_weights,
    packing_dtype,
)
from memcalc.spec.model import ATTENTION, EXPERTS, MAMBA, MLP, ModelSpec
from memcalc.spec.spec import Spec
from memcalc.spec.towers import VISION
from memcalc.spec.training import TOKENWISE

LINEAR_TARGETS = frozenset(
    (*ATTENTION_TARGETS, *LINEAR_ATTENTION_TARGETS, *MAMBA_TARGETS, *LATENT_TARGETS, *MLP_TARGETS)
)


class Quantization(NamedTuple):
    """4-bit quantization of weight matrices."""

    block_size: int  # elements that share one scale
    nested: bool  # whether the scales are quantized too (double quantization)
    head: bool  # whether the LM head is quantized
    storage: str = "uint8"  # dtype of the tensors that hold the packed 4-bit values
    unsharded: bool = False  # whether engines leave these tensors whole on every rank
    original: str = ""  # dtype in which backward dequantizes; "": that of other weights
    compute: str = ""  # dtype in which layers multiply outside of autocast; "": that of the step
    torchao: bool = False  # whether weights are torchao's NF4Tensor, as in torchtune; else bitsandbytes'


class Adapters(NamedTuple):
    """Adapters of a run. Modules are named by the last part of their names.

    Args:
        targets: modules with a LoRA adapter.
        rank: rank of the adapters.
        dtype: dtype of the adapter weights that modules read.
        dropout: dropout probability at the input of an adapter.
        saved: modules that are trained in full (`modules_to_save`).
        quantized: how frozen matrices are quantized; None without quantization.
        input_gradient: whether the embedding's output requires a gradient.
        keeps_inputs: whether frozen linear layers, too, save their input, which no gradient needs.
        input_dtype: dtype to which PEFT casts an adapter's input, where it is not `dtype`.
        fused: parts of a layer that one of axolotl's autograd functions runs (`FUSED_PARTS`).
        joined: with LitGPT's modules, those of q, k and v that share its one adapter; None with PEFT's.
        joins_unequal_parts: whether k and v have fewer heads than q.
        magnitudes: whether an adapter also trains a magnitude for each output (DoRA).
    """

    targets: tuple[str, ...]
    rank: int
    dtype: str
    dropout: float
    saved: tuple[str, ...]
    quantized: Quantization | None
    input_gradient: bool
    saves_inputs: bool = False
    input_dtype: str = ""
    fused: tuple[str, ...] = ()
    joined: tuple[str, ...] | None = None
    joins_unequal_parts: bool = False
    magnitudes: bool = False

    @property
    def separate_qkv(self) -> bool:
        """Whether plain modules have separate q, k and v projections, each with its own adapter."""
        return self.joined is None

    def quantizes(self, module: str) -> bool:
        """Return whether the weight of a linear layer is 4-bit quantized."""
        name = module.rpartition(".")[2]
        if self.quantized is None or name in self.saved:
            return False
        if module.startswith(VISION):
            return True
        return name in LINEAR_TARGETS or (name == "lm_head" and self.quantized.head)


@cached_by_spec
def adapters_of(spec: Spec) -> Adapters | None:
    """Return the adapters of a run; None for full fine-tuning."""
    training = spec.training
    if spec.inference is not None and training.completion_length is None:
        return frozen_for(spec.inference.quantization, spec.inference.matmul_dtype)
    if training.lora is None:
        return None
    found = _adapters(
        training.lora, training.qlora, spec.model, training.implementation, training.dtype, training.recipe
    )
    if found.quantized is not None:
        storage, left = packing_dtype(training, spec.parallelism), leaves_packed_weights(training, spec.parallelism)
        torchao = training.framework == "torchtune"
        found = found._replace(quantized=found.quantized._replace(storage=storage, unsharded=left, torchao=torchao))
    # DeepSpeed 0.19 runtime/zero/linear.py: under stage 3 each layer saves input and weight, trained or not.
    return found._replace(saves_inputs=True) if replaces_linears(spec) else found


def keeps_qkv_apart(spec: Spec) -> bool:
    """Return whether plain modules have separate q, k and v projections: each with an adapter, or fake-quantized."""
    adapters = None if spec.training.lora is None else adapters_of(spec)
    if adapters is not None:
        return adapters.separate_qkv
    return spec.training.fake_quantization != "none"


def replaces_linears(spec: Spec) -> bool:
    """Return whether DeepSpeed's stage 3 replaces linear layers with its own (runtime/zero/linear.py).

    deepspeed.zero.Init replaces them. 4-bit matrices are built without it and sharded afterwards.
    """
    parallelism = spec.parallelism
    gathers = parallelism.engine == "deepspeed" and parallelism.zero_stage == 3
    return gathers and spec.training.finetune != "qlora"


@lru_cache(maxsize=8)
def frozen_for(quantization: str, compute: str) -> Adapters:
    """Return the adapters of generation: nothing trains, and no adapter is added to the matrices."""
    # transformers' BitsAndBytesConfig: blocks of 64 elements, scales in fp32, LM head not quantized.
    asked = Quantization(block_size=64, nested=False, head=False, compute=compute)
    quantized = None if quantization == "none" else asked
    return Adapters((), 0, "", 0.0, (), quantized, input_gradient=False)


@lru_cache(maxsize=256)
def _adapters(
    lora: LoraSpec,
    qlora: QloraSpec | None,
    model: ModelSpec,
    implementation: str,
    dtype: str,
    recipe: str,
) -> Adapters:
    quantized = None
    if qlora is not None:
        head = qlora.quantize_lm_head and not model.tie_word_embeddings
        original = "" if qlora.original_dtype == "compute" else qlora.original_dtype
        compute = qlora.compute_dtype or ""
        quantized = Quantization(qlora.block_size, qlora.double_quantization, head, original=original, compute=compute)
    targets, joined = adapted_modules(lora, model, implementation), None
    if lora.implementation == "litgpt":
        joined = tuple(name for name in targets if name in QKV)
        targets = (*(("qkv_proj",) if joined else ()), *(name for name in targets if name not in QKV))
    return Adapters(
        targets=targets,
        rank=lora.rank,
        dtype=_dtype(lora, dtype, recipe),
        dropout=lora.dropout,
        # PEFT's SEQ_CLS trains the head as well (peft_model.py, PeftModelForSequenceClassification)
        saved=(*lora.modules_to_save, *(("score",) if model.num_labels else ())),
        quantized=quantized,
        input_gradient=lora.input_require_grads or "embed_tokens" in lora.modules_to_save,
        fused=lora.fused,
        joined=joined,
        joins_unequal_parts=model.num_key_value_heads != model.num_attention_heads,
        magnitudes=lora.dora,
    )


def _dtype(lora: LoraSpec, dtype: str, recipe: str) -> str:
    """Return the dtype of adapters; "compute" is that of the step's matmuls."""
    if lora.adapter_dtype != "compute":
        return lora.adapter_dtype
    return "fp32" if recipe == "fp32" else dtype


def first_layer_adapts(model: ModelSpec, targets: Iterable[str]) -> bool:
    """Return whether the first layer has one of the linear layers with an adapter."""
    mixer, there = model.mixer(0), set[str]()
    if model.is_linear(0):
        there.update(LINEAR_ATTENTION_TARGETS)
    elif mixer in ("", ATTENTION):
        there.update(ATTENTION_TARGETS)
    moe = model.moe if model.has_experts(0) else None
    if mixer in ("", MLP) if moe is None else moe.shared_expert_intermediate_size or moe.dense_mlp:
        there.update(MLP_TARGETS)
    there.update(MAMBA_TARGETS if mixer == MAMBA else LATENT_TARGETS if mixer == EXPERTS else ())
    return not there.isdisjoint(targets)


def loss_gathers_head(spec: Spec) -> bool:
    """Return whether TRL's loss gathers the LM head's weight from its shards, in their dtype, and its unit never runs.

    trl 1.16 trainer/utils.py, _fused_forward: DTensor.full_tensor. FSDP2's hooks do not run, nor does its policy.
    """
    fsdp2 = spec.parallelism.engine == "fsdp2" and spec.parallelism.zero_stage > 0
    reads = spec.training.loss in TOKENWISE and not spec.model.tie_word_embeddings
    return fsdp2 and reads and adapters_of(spec) is not None and spec.parallelism.fsdp.wrap == "layers-and-ends"


def read_dtype(spec: Spec) -> str:
    """Return the dtype of the weights that modules read: the dtype of FSDP2's all-gather, else the stored dtype."""
    return spec.parallelism.fsdp.param_dtype or base_dtype(spec.training)
