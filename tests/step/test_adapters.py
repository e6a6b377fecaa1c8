"""PEFT's adapters and bitsandbytes' matrices on the models that the step runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memcalc.layout.peft_parameters import all_parameters, trainable_parameters
from memcalc.spec.loading import load
from memcalc.step.causal_lm import build
from memcalc.step.quantization import elements, quantized_tensors

TINY = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 32}
LLAMA = {"architecture": "llama", "num_key_value_heads": 2, "intermediate_size": 96, "tie_word_embeddings": False}
MOE = {
    "num_experts": 4,
    "num_experts_per_token": 2,
    "expert_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "first_dense_layers": 1,
}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("gpt", {"fused_qkv": True}, "plain"),
    ("gpt, q, k and v apart", {}, "plain"),
    ("llama", LLAMA, "plain"),
    ("experts", LLAMA | {"moe": MOE}, "plain"),
    ("gpt2", {"architecture": "gpt2"}, "huggingface"),
    ("codegen", {"architecture": "codegen"}, "huggingface"),
    ("llama", LLAMA, "huggingface"),
    ("qwen3", {"architecture": "qwen3", "num_key_value_heads": 2, "head_dim": 32}, "huggingface"),
]
each = pytest.mark.parametrize(("model", "implementation"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])


def spec(model: dict[str, Any], implementation: str = "plain", **training: Any) -> Any:
    given: dict[str, Any] = {"sequence_length": 32, "finetune": "lora", "dropout": 0.0, "attention": "eager"}
    return load({"model": TINY | model, "training": given | {"implementation": implementation} | training})


@each
@pytest.mark.parametrize("targets", ["all-linear", "attention", "mlp"])
def test_what_trains_is_what_estimate_counts(model: dict[str, Any], implementation: str, targets: str) -> None:
    given = spec(model, implementation, lora={"rank": 4, "target_modules": targets})
    parameters = list(build(given, torch.device("cpu")).module.parameters())

    assert sum(p.numel() for p in parameters) == all_parameters(given)
    assert sum(p.numel() for p in parameters if p.requires_grad) == trainable_parameters(given)
    assert {p.dtype for p in parameters if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in parameters if not p.requires_grad} == {torch.bfloat16}


@each
def test_only_adapters_get_gradients(model: dict[str, Any], implementation: str) -> None:
    given = spec(model, implementation, lora={"rank": 4}, recompute="full")
    built = build(given, torch.device("cpu"))
    tokens = torch.randint(96, (1, 32))
    with built.contexts():
        built.loss(built.logits(tokens), tokens).backward()

    assert all((p.grad is not None) is p.requires_grad for p in built.module.parameters())


@pytest.mark.parametrize("implementation", ["plain", "huggingface"])
def test_modules_to_save_train_in_a_copy(implementation: str) -> None:
    given = spec(LLAMA, implementation, lora={"modules_to_save": ["embed_tokens", "lm_head"]})
    parameters = list(build(given, torch.device("cpu")).module.parameters())

    assert sum(p.numel() for p in parameters if p.requires_grad) == trainable_parameters(given)
    assert sum(p.numel() for p in parameters) == all_parameters(given)


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("implementation", ["plain", "huggingface"])
def test_the_embeddings_output_needs_a_gradient_if_the_spec_says_so(
    implementation: str, recompute: str, needed: bool
) -> None:
    given = spec(LLAMA, implementation, lora={"input_require_grads": needed}, recompute=recompute)
    built = build(given, torch.device("cpu"))
    embedding = next(part for part in built.module.modules() if isinstance(part, torch.nn.Embedding))

    assert embedding(torch.zeros(1, 1, dtype=torch.int64)).requires_grad is needed


@each
def test_quantized_matrices_stand_for_as_many_elements(model: dict[str, Any], implementation: str) -> None:
    pytest.importorskip("bitsandbytes")
    given = spec(model, implementation, finetune="qlora", lora={"rank": 4})
    built = build(given, torch.device("cpu"))
    tokens = torch.randint(96, (1, 32))
    with built.contexts():
        built.loss(built.logits(tokens), tokens).backward()

    assert sum(elements(p) for p in built.module.parameters()) == all_parameters(given)
    assert list(quantized_tensors(built.module))
    assert all((p.grad is not None) is p.requires_grad for p in built.module.parameters())
