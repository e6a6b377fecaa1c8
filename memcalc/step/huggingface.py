"""transformers' own classes, built from a spec with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from transformers import masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer

from memcalc.errors import InputError
from memcalc.spec.model import ModelSpec
from memcalc.spec.spec import Spec
from memcalc.step.attention import CPU_BACKENDS, CUDA_BACKENDS
from memcalc.step.causal_lm import CausalLM
from memcalc.step.dtypes import weight_dtype
from memcalc.step.recompute import recomputed_layers


def build_huggingface(spec: Spec, place: torch.device, device: torch.device) -> CausalLM:
    """AutoModelForCausalLM for the spec's architecture, its weights on `place`, to be run on `device`.

    Raises:
        InputError: the architecture is not known here, or does not do what is asked.
    """
    training = spec.training
    config = build_config(spec)
    kernel = "eager" if training.attention == "eager" else "sdpa"
    with place:
        try:
            module = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=weight_dtype(training), attn_implementation=kernel
            )
        except ValueError as error:
            if kernel == "eager":
                raise
            raise InputError(
                f"transformers' {spec.model.architecture} has eager attention only, but attention = "
                f"{training.attention}.",
                "Set training.attention: eager.",
                "training.attention",
            ) from error
    module.train()
    if getattr(module, "loss_type", None) is None:
        module.loss_type = "ForCausalLM"  # what transformers falls back to, with a warning
    switch_recompute(module, spec)
    backends = [CUDA_BACKENDS[training.attention]] if kernel == "sdpa" and device.type == "cuda" else CPU_BACKENDS

    @contextmanager
    def surroundings() -> Iterator[None]:
        with one_sequence_a_row(), nullcontext() if kernel == "eager" else sdpa_kernel(backends):
            yield

    def logits(input_ids: Tensor) -> Tensor:
        return module(input_ids=input_ids, use_cache=False).logits  # type: ignore[no-any-return]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = module.loss_function(logits=logits, labels=labels, vocab_size=spec.model.vocab_size)
        return found

    def hidden(input_ids: Tensor) -> Tensor:
        return module.base_model(input_ids=input_ids, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    return CausalLM(module, logits, loss, surroundings, hidden, module.get_output_embeddings)


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Spare transformers the search for several sequences packed in one row.

    It reads position ids back from the device. What it would find is known, and on a device that computes nothing it
    finds the wrong thing: a mask, which keeps the flash kernel from running.
    """
    name = "find_packed_sequence_indices"
    search = getattr(masking_utils, name, None)
    if search is None:  # older transformers never searched
        yield
        return
    setattr(masking_utils, name, lambda _: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, search)


def switch_recompute(module: nn.Module, spec: Spec) -> None:
    """The gradient checkpointing of transformers, on the layers that the spec names."""
    if spec.training.recompute == "selective":
        raise InputError(
            "transformers recomputes whole layers, but recompute = selective.",
            "Set recompute: none, full, every-k or a list of layers, or implementation: plain.",
            "training.recompute",
        )
    recomputed = recomputed_layers(spec.training, spec.model.num_layers)
    if not recomputed:
        return
    options = {"use_reentrant": False}
    # The second name is the one before transformers 5.23.
    new_name = hasattr(module, "activation_checkpointing_enable")
    enable = getattr(module, "activation_checkpointing_enable" if new_name else "gradient_checkpointing_enable")
    enable(options)
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index in recomputed


def build_config(spec: Spec) -> Any:
    """The configuration of transformers that has the spec's sizes."""
    architecture = spec.model.architecture or "none"
    if architecture not in CONFIGS:
        raise InputError(
            f"implementation = huggingface is not known for architecture = {architecture}.",
            f"Known: {', '.join(CONFIGS)}. Or set implementation: plain.",
            "model.architecture",
        )
    return CONFIGS[architecture](spec)


def gpt2(spec: Spec) -> Any:
    """GPT-2: learned positions, three dropouts."""
    return transformers.GPT2Config(n_positions=spec.model.max_position_embeddings, **gpt_sizes(spec))


def codegen(spec: Spec) -> Any:
    """CodeGen: rotated heads, attention and MLP side by side."""
    model = spec.model
    positions: dict[str, Any] = dict.fromkeys(("n_positions", "n_ctx"), model.max_position_embeddings)
    return transformers.CodeGenConfig(**positions, rotary_dim=model.rotary_dim, **gpt_sizes(spec))


def llama_like(config: Callable[..., Any], spec: Spec, *names: str) -> Any:
    """Llama and the families that share its keys; `names` are the further ones that this family knows."""
    model = spec.model
    dropout = spec.training.dropout
    further = {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias, "head_dim": model.head_dim}
    return config(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        max_position_embeddings=model.max_position_embeddings,
        tie_word_embeddings=model.tie_word_embeddings,
        attention_dropout=model.attention_dropout if dropout is None else dropout,
        use_cache=False,
        bos_token_id=None,  # no text is made, and the defaults may lie outside a small vocabulary
        eos_token_id=None,
        **{name: further[name] for name in names},
    )


def gpt_sizes(spec: Spec) -> dict[str, Any]:
    """The keys that the GPT family names n_*."""
    model: ModelSpec = spec.model
    dropout = spec.training.dropout
    return {
        "vocab_size": model.vocab_size,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.intermediate_size,
        "resid_pdrop": model.residual_dropout if dropout is None else dropout,
        "embd_pdrop": model.embedding_dropout if dropout is None else dropout,
        "attn_pdrop": model.attention_dropout if dropout is None else dropout,
        "tie_word_embeddings": model.tie_word_embeddings,
        "use_cache": False,
        "bos_token_id": None,  # no text is made, and the defaults may lie outside a small vocabulary
        "eos_token_id": None,
    }


CONFIGS: dict[str, Callable[[Spec], Any]] = {
    "gpt2": gpt2,
    "codegen": codegen,
    "llama": lambda spec: llama_like(transformers.LlamaConfig, spec, "attention_bias", "mlp_bias", "head_dim"),
    "mistral": lambda spec: llama_like(partial(transformers.MistralConfig, sliding_window=None), spec, "head_dim"),
    "qwen2": lambda spec: llama_like(transformers.Qwen2Config, spec),
    "qwen3": lambda spec: llama_like(transformers.Qwen3Config, spec, "attention_bias", "head_dim"),
}
