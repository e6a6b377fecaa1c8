"""Fine-tuning blocks: adapters (LoRA), and a frozen 4-bit base model below them (QLoRA)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from memcalc.spec.fp32_modules import Fp32Modules
from memcalc.spec.model import ATTENTION, MAMBA, MLP, ConfigBlock, ModelSpec, Probability, Size
from memcalc.spec.recipes import RECIPES, Dtype

if TYPE_CHECKING:
    from memcalc.spec.training import ParallelismSpec, TrainingSpec

# Linear layers that can have adapters, by their names in the parameter table.
ATTENTION_TARGETS = (
    *("qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj"),  # of latent attention
)
QKV = ("q_proj", "k_proj", "v_proj")
# of linear attention (Qwen3.5, and Qwen3-Next's fused ones)
LINEAR_ATTENTION_TARGETS = (
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    *("in_proj_qkvz", "in_proj_ba", "out_proj"),
)
# of Mamba-2; PEFT rejects adapters of its out_proj (PEFT 0.21 tuners_utils.py, _check_lora_target_modules_mamba)
MAMBA_TARGETS = ("in_proj",)
LATENT_TARGETS = ("fc1_latent_proj", "fc2_latent_proj")  # of routed experts
MLP_TARGETS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
HEAD, EMBEDDING = "lm_head", "embed_tokens"
MAGNITUDE = "lora_magnitude"  # module of DoRA's trained magnitudes

Target = Literal[
    "qkv_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj",
    "kv_b_proj",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "in_proj_qkvz",
    "in_proj_ba",
    "out_proj",
    "in_proj",
    "fc1_latent_proj",
    "fc2_latent_proj",
    "gate_up_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "lm_head",
]
# A model without formulas has layers of other names, too.
Named = Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")]
Targets = Annotated[tuple[Target | Named, ...], Field(strict=False, min_length=1)]
Saved = Annotated[tuple[Literal["embed_tokens", "lm_head"], ...], Field(strict=False)]
Precision = Literal["fp32", "compute"]

# Parts of a layer that one of axolotl's autograd functions runs, and their linear layers (axolotl 0.19
# monkeypatch/lora_kernels.py), in modelled families with a layer that it patches.
FUSED_PARTS = {"qkv": QKV, "o": ("o_proj",), "mlp": ("gate_proj", "up_proj", "down_proj")}
FUSED_FAMILIES = (
    *("gemma", "gemma2", "gemma3_text", "granite", "hunyuan_v1_dense", "llama", "mistral", "qwen2", "qwen3"),
    "smollm3",
)
FusedPart = Literal["qkv", "o", "mlp"]

# Block sizes with kernels in bitsandbytes (bitsandbytes 0.50 functional.py, quantize_4bit).
BlockSize = Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]


class LoraSpec(ConfigBlock):
    """Low-rank adapters of frozen linear layers (LoRA, arXiv 2106.09685), as PEFT or LitGPT makes them."""

    implementation: Literal["peft", "litgpt"] = Field(
        "peft",
        description="implementation of the adapters: peft | litgpt (one for q, k and v together, with a "
        "convolution for its outputs; with implementation plain)",
    )
    rank: Size = Field(8, description="r: rank of an adapter; the default is PEFT's")
    alpha: Size = Field(8, description="the adapter's output is scaled by alpha / rank; no effect on memory")
    dropout: Probability = Field(0.0, description="dropout on the adapter's input")
    dora: bool = Field(
        False,
        description="whether an adapter also trains the magnitude of each row of the sum of both weights (DoRA, arXiv "
        "2402.09353), as torchtune makes it; with implementation plain",
    )
    target_modules: Literal["all-linear", "attention", "mlp"] | Targets = Field(
        "all-linear", description="all-linear | attention | mlp | a list of layers, such as [q_proj, v_proj]"
    )
    adapter_dtype: Literal["fp32", "compute", "bf16"] = Field(
        description="fp32 (PEFT's autocast_adapter_dtype) | compute | bf16; default: fp32, compute under mixed recipes"
    )
    base_dtype: Precision = Field(
        description="dtype of frozen weights that are not 4-bit; default: fp32 under recipes fp32 and amp, else compute"
    )
    modules_to_save: Saved = Field((), description="[embed_tokens, lm_head]: trained in full, in a separate copy")
    fused: Annotated[tuple[FusedPart, ...], Field(strict=False)] = Field(
        (),
        description="parts of a layer that one autograd function runs with its adapters: [qkv, o, mlp] (axolotl's "
        "lora_*_kernel; with implementation huggingface)",
    )
    fp32_on_load: Fp32Modules = Field(
        (),
        description="frozen modules that are cast to fp32 and back before adapters are made (axolotl, QLoRA): "
        "embed_tokens | lm_head | norm",
    )
    input_require_grads: bool = Field(
        description="whether the embedding's output needs a gradient; default: if anything is recomputed, as PEFT does"
    )


# Families with linear layers of a subclass of nn.Linear, which transformers does not quantize (5.23
# models/falcon/modeling_falcon.py, FalconLinear; integrations/bitsandbytes.py, replace_with_bnb_linear).
OWN_LINEAR = ("falcon",)


class QloraSpec(ConfigBlock):
    """The frozen base model in 4 bits (QLoRA, arXiv 2305.14314), as implemented by bitsandbytes."""

    quantization: Literal["nf4", "fp4"] = Field("nf4", description="the 16 values of the 4-bit type")
    double_quantization: bool = Field(True, description="whether the scales are quantized to 8 bits too")
    block_size: BlockSize = Field(64, description="elements that share a scale")
    quantize_lm_head: bool = Field(False, description="whether an untied LM head is quantized too")
    original_dtype: Literal["compute", "fp16"] = Field(
        "compute",
        description="dtype of a weight when it is quantized, in which backward restores it: compute | fp16 (Lightning)",
    )
    compute_dtype: Dtype | None = Field(
        None, description="dtype in which 4-bit layers multiply (bnb_4bit_compute_dtype); default: that of the step"
    )
    quant_storage: Literal["compute", "uint8"] | None = Field(
        None,
        description="dtype of the tensors that hold 4-bit values: compute (a floating-point dtype, as sharding engines "
        "need) | uint8 (Accelerate's FSDP2 then leaves them unsharded); default: compute where an engine shards them",
    )


def base_dtype(training: TrainingSpec) -> str:
    """Return the dtype of the stored weights: from the recipe, or that of the frozen base model."""
    in_16_bits = training.weight_dtype or training.dtype
    if training.lora is not None:
        return "fp32" if training.lora.base_dtype == "fp32" else in_16_bits
    weights = RECIPES[training.recipe].weights
    return in_16_bits if weights == "compute" else weights


def packing_dtype(training: TrainingSpec, parallelism: ParallelismSpec) -> str:
    """Return the dtype in which 4-bit weights are packed: bytes, or the dtype of other weights if they are sharded.

    transformers' bnb_4bit_quant_storage: engines gather parameters of one floating-point dtype.
    """
    asked = None if training.qlora is None else training.qlora.quant_storage
    if asked is None:
        asked = "compute" if _spreads_weights(parallelism) else "uint8"
    return training.dtype if asked == "compute" else "uint8"


def leaves_packed_weights(training: TrainingSpec, parallelism: ParallelismSpec) -> bool:
    """Return whether FSDP2 leaves 4-bit weights unsharded, because they are packed in integers.

    Accelerate 1.15 utils/fsdp_utils.py, fsdp2_prepare_model, incompatible_params4bit.
    """
    whole = parallelism.engine == "fsdp2" and _spreads_weights(parallelism)
    return whole and training.finetune == "qlora" and packing_dtype(training, parallelism) == "uint8"


def _spreads_weights(parallelism: ParallelismSpec) -> bool:
    """Return whether an engine shards the weights."""
    return parallelism.shards > 1 and parallelism.zero_stage >= (2 if parallelism.engine in ("fsdp1", "fsdp2") else 3)


def default_finetuning(training: dict[str, Any]) -> dict[str, Any]:
    """Return a training block with the defaults that follow from its blocks `lora` and `qlora`, or from `finetune`.

    Validation rejects values of a wrong type.
    """
    filled = dict(training)
    if "qlora" in filled:
        filled.setdefault("finetune", "qlora")
    elif "lora" in filled:
        filled.setdefault("finetune", "lora")
    if filled.get("finetune") in ("lora", "qlora"):
        filled.setdefault("recipe", "pure")  # the base model is frozen, so it has no fp32 master weights
        filled.setdefault("lora", {})
        if filled["finetune"] == "qlora":
            filled.setdefault("qlora", {})
    lora = filled.get("lora")
    if isinstance(lora, dict):
        recipe = str(filled.get("recipe"))
        derived = {
            "adapter_dtype": "compute" if recipe.startswith("mixed") else "fp32",
            "base_dtype": "fp32" if recipe in ("fp32", "amp") else "compute",
            "input_require_grads": filled.get("recompute", "none") not in ("none", "selective", []),
        }
        filled["lora"] = derived | lora
    return filled


def adaptable_modules(model: ModelSpec, implementation: str, adapters: str = "peft") -> tuple[str, ...]:
    """Return the linear layers of one layer that can have adapters, by their names in the parameter table.

    The plain implementation has separate gate and up projections. Routers and stacked experts are not nn.Linear.
    LitGPT's adapter of q, k and v includes or omits each of the three, for fused families too.
    """
    if model.layer_pattern:
        return _adaptable_mixers(model)
    if model.mla is not None:
        query = ("q_a_proj", "q_b_proj") if model.mla.q_lora_rank else ("q_proj",)
        attention = (*query, "kv_a_proj", "kv_b_proj", "o_proj")
    else:
        apart = not model.fused_qkv or adapters == "litgpt"
        attention = (*(QKV if apart else ("qkv_proj",)), "o_proj")
    if model.linear_attention is not None:
        fused = model.linear_attention.fused_projections
        attention += LINEAR_ATTENTION_TARGETS[4:] if fused else (*LINEAR_ATTENTION_TARGETS[:4], "out_proj")
    if model.layers_with_experts(0, model.num_layers) == model.num_layers:
        moe = model.moe
        if moe is not None and not (moe.shared_expert_intermediate_size or moe.dense_mlp):
            return attention
    if not model.gated_mlp:
        return (*attention, "up_proj", "down_proj")
    up = ("gate_up_proj",) if model.fused_gate_up and implementation != "plain" else ("gate_proj", "up_proj")
    return (*attention, *up, "down_proj")


def _adaptable_mixers(model: ModelSpec) -> tuple[str, ...]:
    """Return the linear layers that can have adapters in a model of layers with a single module."""
    mixers, moe = model.mixers, model.moe
    found: tuple[str, ...] = ()
    if MAMBA in mixers:
        found += MAMBA_TARGETS
    if ATTENTION in mixers:
        found += (*QKV, "o_proj")
    if MLP in mixers or (moe is not None and moe.shared_expert_intermediate_size):
        found += ("gate_proj", "up_proj", "down_proj") if model.gated_mlp else ("up_proj", "down_proj")
    return found + LATENT_TARGETS if moe is not None and moe.latent_size else found


def adapted_modules(lora: LoraSpec, model: ModelSpec, implementation: str) -> tuple[str, ...]:
    """Return the linear layers that have an adapter: all-linear has all but the LM head (PEFT 0.21 tuners_utils.py)."""
    there = adaptable_modules(model, implementation, lora.implementation)
    wanted = lora.target_modules
    if wanted == "all-linear":
        return there
    if isinstance(wanted, str):
        group = ATTENTION_TARGETS if wanted == "attention" else MLP_TARGETS
        return tuple(name for name in there if name in group)
    return tuple(name for name in (*there, HEAD) if name in wanted)


def none_of_these(wanted: str | Sequence[str], there: Iterable[str]) -> tuple[str, str]:
    """Return the problem and the remedy of targets that no layer has; `there`: names of linear layers."""
    named = wanted if isinstance(wanted, str) else ", ".join(wanted)
    return (
        f"target_modules names {named}, which the layers of this model do not have.",
        f"Choose from {', '.join(there)}.",
    )


def names_without_layer(lora: LoraSpec, model: ModelSpec, implementation: str) -> tuple[str, ...]:
    """Return the listed targets that no layer has; PEFT ignores them if others have one (PEFT 0.21 tuners_utils.py)."""
    wanted = () if isinstance(lora.target_modules, str) else lora.target_modules
    there = adapted_modules(lora, model, implementation)
    return tuple(name for name in wanted if name not in there)
