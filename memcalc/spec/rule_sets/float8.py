"""Rules of torchao's FP8 linear layers: supported combinations, and matrix dimensions."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.rule_sets.violations import Violation
from memcalc.spec.spec import Spec
from memcalc.spec.yaml_source import Path

STEP = 16  # torch 2.13 aten/src/ATen/native/cuda/ScaledBlas.cpp, _scaled_mm: trailing dimensions divisible by 16

KEY: Path = ("training", "fp8")


def float8_rules(spec: Spec) -> Iterator[Violation]:
    """Yield violations of these rules."""
    training = spec.training
    if training.finetune != "full":
        yield Violation(
            KEY,
            f"fp8 = {training.fp8} is not modelled with finetune = {training.finetune}, which puts adapters on "
            "torchao's "
            "layers.",
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
