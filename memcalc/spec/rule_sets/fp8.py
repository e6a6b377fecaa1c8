"""Rules of FP8 matmuls: supported modules, GPUs and sizes."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.errors import InputError
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.rule_sets.violations import Violation
from memcalc.spec.spec import Spec
from memcalc.spec.training import Fp8
from memcalc.spec.yaml_source import Path

# Transformer Engine 2.11 pytorch/quantization.py: check_fp8_support, check_mxfp8_support,
# check_fp8_block_scaling_support; torchao 0.18 float8/README.md.
LEAST_CAPABILITY: dict[Fp8, tuple[int, int]] = {
    "delayed": (8, 9),
    "tensorwise": (8, 9),
    "mxfp8": (10, 0),
    "blockwise": (9, 0),
    "rowwise": (8, 9),
    "rowwise-gw-hp": (8, 9),
}
TRANSFORMER_ENGINE = ("delayed", "tensorwise", "mxfp8", "blockwise")
TORCHAO = ("tensorwise", "rowwise", "rowwise-gw-hp")
# pytorch/utils.py, assert_dim_for_fp8_exec; pytorch/tensor/mxfp8_tensor.py, make_empty.
MULTIPLE_OF_WIDTH = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 16}
MULTIPLE_OF_TOKENS = {"delayed": 8, "tensorwise": 8, "mxfp8": 32, "blockwise": 8}

KEY: Path = ("training", "fp8")


def fp8(spec: Spec) -> Iterator[Violation]:
    """Yield violations of these rules."""
    training, recipe = spec.training, spec.training.fp8
    if recipe == "none":
        yield from _without(spec)
        return
    megatron = training.implementation == "megatron"
    recipes, library = (TRANSFORMER_ENGINE, "Transformer Engine") if megatron else (TORCHAO, "torchao")
    if recipe not in recipes:
        yield Violation(
            KEY,
            f"fp8 = {recipe} is not supported by {library}, which implementation = {training.implementation} uses.",
            f"Set fp8: {' or '.join(recipes)}, or implementation: {'plain' if megatron else 'megatron'}.",
        )
        return
    if megatron and not training.transformer_engine:
        yield Violation(
            KEY,
            f"fp8 = {recipe} needs Transformer Engine, but attention = eager selects Megatron-Core's own modules.",
            "Set attention: flash, or fp8: none.",
        )
    if training.dtype == "fp32":
        yield Violation(
            KEY, f"fp8 = {recipe} needs a 16-bit dtype, but dtype = fp32.", "Set dtype: bf16 or fp16, or fp8: none."
        )
    gpu, least = _gpu(spec), LEAST_CAPABILITY[recipe]
    if gpu is not None and gpu.compute_capability is not None and gpu.compute_capability < least:
        found, needed = (".".join(map(str, each)) for each in (gpu.compute_capability, least))
        yield Violation(
            KEY,
            f"fp8 = {recipe} needs compute capability {needed}, but {gpu.label} has {found}.",
            "Use a newer GPU, or set fp8: none.",
        )
    yield from _options(spec)
    yield from _sizes(spec, recipe) if megatron else float8_rules(spec)


def _without(spec: Spec) -> Iterator[Violation]:
    """Yield violations by FP8 options without FP8."""
    for name in ("fp8_all_gather", "fp8_params"):
        if getattr(spec.training, name):
            yield Violation(
                ("training", name), f"{name} = true needs FP8 matmuls, but fp8 = none.", f"Set fp8, or {name}: false."
            )


def _options(spec: Spec) -> Iterator[Violation]:
    """Yield violations by options that the implementation lacks."""
    training, parallelism = spec.training, spec.parallelism
    if training.fp8_params and training.implementation != "megatron":
        yield Violation(
            ("training", "fp8_params"),
            f"fp8_params = true needs implementation = megatron, not {training.implementation}: torchao's weights stay "
            "in 16 or 32 bits.",
            "Set fp8_params: false, or implementation: megatron.",
        )
    elif training.fp8_params and not parallelism.zero_stage:
        yield Violation(
            ("training", "fp8_params"),
            "fp8_params = true needs Megatron-LM's distributed optimizer, but zero_stage = 0.",
            "Set fp8_params: false, or zero_stage: 1.",
        )
    if not training.fp8_all_gather:
        return
    if training.implementation == "megatron" or training.fp8 != "tensorwise":
        yield Violation(
            ("training", "fp8_all_gather"),
            f"fp8_all_gather = true needs torchao's fp8 = tensorwise, but fp8 = {training.fp8} with implementation = "
            f"{training.implementation}.",
            "Set fp8_all_gather: false, or fp8: tensorwise and an implementation other than megatron.",
        )
    elif parallelism.engine != "fsdp2" or parallelism.shards == 1:
        yield Violation(
            ("training", "fp8_all_gather"),
            f"fp8_all_gather = true needs FSDP2 on several ranks, but engine = {parallelism.engine} and data_parallel "
            f"= {parallelism.data_parallel}.",
            "Set fp8_all_gather: false, or engine: fsdp2 and data_parallel: 2 or more.",
        )


def _gpu(spec: Spec) -> GpuSpec | None:
    try:
        return spec.gpu
    except InputError:  # reported separately, with its own place
        return None


def _sizes(spec: Spec, recipe: str) -> Iterator[Violation]:
    model, ranks = spec.model, spec.parallelism.tensor_parallel
    widths = {"hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size // ranks}
    step = MULTIPLE_OF_WIDTH[recipe]
    for name, width in widths.items():
        if width % step:
            yield Violation(
                KEY,
                f"fp8 = {recipe} needs matrix dimensions that are multiples of {step}, but {name} = {width} on a rank.",
                "Change the size, or set fp8: none.",
            )
    tokens = spec.training.micro_batch_size * (spec.training.sequence_length // spec.parallelism.context_parallel)
    if tokens % MULTIPLE_OF_TOKENS[recipe]:
        yield Violation(
            KEY,
            f"fp8 = {recipe} needs a multiple of {MULTIPLE_OF_TOKENS[recipe]} tokens, but b·s = {tokens} on a rank.",
            "Choose another sequence_length, or set fp8: none.",
        )


STEP = 16  # torch 2.13 aten/src/ATen/native/cuda/ScaledBlas.cpp, _scaled_mm: trailing dimensions divisible by 16


def float8_rules(spec: Spec) -> Iterator[Violation]:
    """Yield violations of these rules."""
    training = spec.training
    if training.finetune != "full":
        yield Violation(
            KEY,
            f"fp8 = {training.fp8} is not modelled with finetune = {training.finetune}, which puts adapters on "
            "torchao's layers.",
            "Set fp8: none, or finetune: full.",
        )
    if spec.model.tie_word_embeddings and not skips(spec, "lm_head"):
        yield Violation(
            ("training", "fp8_skip"),
            "fp8_skip lacks lm_head, which shares the embedding's weight: torchao's matmuls of both are not modelled.",
            "Add lm_head to fp8_skip.",
        )
    for name, width in _sides(spec).items():
        if width % STEP:
            yield Violation(
                KEY,
                f"fp8 = {training.fp8} needs matrix dimensions that are multiples of {STEP}, but {name} = {width}.",
                "Change the size, add its layers to fp8_skip, or set fp8: none.",
            )
    tokens = training.micro_batch_size * (training.sequence_length // spec.parallelism.context_parallel)
    if tokens % STEP:
        yield Violation(
            KEY,
            f"fp8 = {training.fp8} needs a multiple of {STEP} tokens, but b·s = {tokens} on a rank.",
            "Choose another sequence_length, or set fp8: none.",
        )


def skips(spec: Spec, module: str) -> bool:
    """Return whether a layer is excluded from FP8."""
    return any(part in module for part in spec.training.fp8_skip)


def _sides(spec: Spec) -> dict[str, int]:
    """Return the dimensions of the FP8 matmuls on a rank, by their names in the model block."""
    model, ranks = spec.model, spec.parallelism.tensor_parallel
    whole: dict[str, tuple[str, int]] = {"hidden_size": ("attention.o_proj", model.hidden_size)}
    split: dict[str, tuple[str, int]] = {
        "intermediate_size": ("mlp.up_proj", model.intermediate_size),
        "num_attention_heads · head_dim": ("attention.o_proj", model.query_size),
        "num_key_value_heads · head_dim": ("attention.k_proj", model.num_key_value_heads * model.head_dim),
        "vocab_size": ("lm_head", model.vocab_size),
    }
    if model.full_attention is not None:
        head, groups = model.full_attention.head_dim, model.full_attention.num_key_value_heads
        split["num_attention_heads · full_attention.head_dim"] = (
            "attention.o_proj",
            model.num_attention_heads * head,
        )
        split["full_attention.num_key_value_heads · full_attention.head_dim"] = ("attention.k_proj", groups * head)
    if model.moe is not None:
        whole["num_experts"] = ("mlp.router", model.moe.num_experts)
        split["shared_expert_intermediate_size"] = (
            "mlp.shared_expert.up_proj",
            model.moe.shared_expert_intermediate_size,
        )
        if model.moe.shared_expert_gate:
            whole["the shared expert's gate"] = ("mlp.shared_expert_gate", 1)
    if ranks > 1:
        split = {f"{name} / tensor_parallel": (module, width // ranks) for name, (module, width) in split.items()}
    return {name: width for name, (module, width) in (whole | split).items() if not skips(spec, module)}
