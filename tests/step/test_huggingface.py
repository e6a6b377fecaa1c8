"""transformers' own classes, built from our specs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memcalc.errors import InputError
from memcalc.layout.parameters import count_parameters
from memcalc.spec.loading import load
from memcalc.step.causal_lm import build
from memcalc.step.huggingface import build_config

TINY = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 32}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 96}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "codegen": {},
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 32},
}


def spec(architecture: str, **training: Any) -> Any:
    model = TINY | {"architecture": architecture} | MODELS.get(architecture, {}) | training.pop("model", {})
    training = {
        "sequence_length": 32,
        "implementation": "huggingface",
        "attention": "eager",
        "recipe": "pure",
    } | training
    return load({"model": model, "training": training})


@pytest.mark.parametrize("architecture", MODELS)
def test_parameters_are_those_that_estimate_counts(architecture: str) -> None:
    given = spec(architecture)
    model = build(given, torch.device("meta"))

    assert sum(p.numel() for p in model.module.parameters()) == count_parameters(given.model)


@pytest.mark.parametrize("architecture", MODELS)
def test_loss_in_its_own_phase_is_the_models_own(architecture: str) -> None:
    torch.manual_seed(0)
    model = build(spec(architecture, recipe="fp32", dtype="fp32", dropout=0.0), torch.device("cpu"))
    tokens = torch.randint(96, (2, 32))
    with model.contexts():
        found = model.loss(model.logits(tokens), tokens)
        expected = model.module(input_ids=tokens, labels=tokens, use_cache=False).loss

    torch.testing.assert_close(found, expected)


def test_weights_are_made_in_the_recipes_dtype() -> None:
    assert {p.dtype for p in build(spec("llama"), torch.device("cpu")).module.parameters()} == {torch.bfloat16}
    amp = build(spec("llama", recipe="amp"), torch.device("cpu"))
    assert {p.dtype for p in amp.module.parameters()} == {torch.float32}


def test_recompute_switches_the_layers_of_the_plan() -> None:
    module: Any = build(spec("llama", recompute=[1]), torch.device("cpu")).module
    layers = module.model.layers

    assert [layer.gradient_checkpointing for layer in layers] == [False, True]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_reentrant_where_the_spec_says_so(reentrant: bool) -> None:
    module: Any = build(spec("llama", recompute="full", reentrant_checkpoints=reentrant), torch.device("cpu")).module
    checkpoint = module.model.layers[0]._gradient_checkpointing_func

    assert checkpoint.keywords["use_reentrant"] is reentrant


def test_dropout_goes_where_the_class_has_it() -> None:
    config = build_config(spec("gpt2", dropout=0.25))

    assert (config.resid_pdrop, config.attn_pdrop, config.embd_pdrop) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    ("architecture", "training", "words"),
    [
        ("llama", {"model": {"norms_per_layer": 4}}, "norms_per_layer = 4 is not a value that transformers' llama has"),
        ("codegen", {"attention": "flash"}, "codegen does not support sdpa"),
        ("llama", {"recompute": "selective"}, "recomputes whole layers"),
    ],
)
def test_what_transformers_does_not_do_is_refused(architecture: str, training: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build(spec(architecture, **training), torch.device("cpu"))
