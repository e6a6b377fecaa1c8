"""LoRA adapters by PEFT, on the reference decoder and on the classes of transformers."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memcalc.errors import InputError, Unavailable
from memcalc.extras import installation
from memcalc.spec.finetuning import (
    ATTENTION_TARGETS,
    HEAD,
    MLP_TARGETS,
    LoraSpec,
    adaptable_modules,
    adapted_modules,
    none_of_these,
)
from memcalc.spec.spec import Spec
from memcalc.step.dtypes import compute_dtype
from memcalc.step.packages import import_package

_GPT2 = {
    "qkv_proj": "attn.c_attn",
    "o_proj": "attn.c_proj",
    "up_proj": "mlp.c_fc",
    "down_proj": "mlp.c_proj",
    "embed_tokens": "wte",
}
_FALCON = {
    "qkv_proj": "query_key_value",
    "o_proj": "self_attention.dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "embed_tokens": "word_embeddings",
}
# Names in the classes of transformers for the layers of the parameter table; absent names are equal.
FAMILY_NAMES = {
    "gpt2": _GPT2,
    "bloom": _FALCON,
    "codegen": {"o_proj": "out_proj", "up_proj": "fc_in", "down_proj": "fc_out", "embed_tokens": "wte"},
    "deepseek_v2": {"kv_a_proj": "kv_a_proj_with_mqa"},
    "deepseek_v3": {"kv_a_proj": "kv_a_proj_with_mqa"},
    "falcon": _FALCON,
    "gpt_bigcode": _GPT2,
    "gpt_neo": {"o_proj": "out_proj", "up_proj": "mlp.c_fc", "down_proj": "mlp.c_proj", "embed_tokens": "wte"},
    "gpt_neox": {
        "qkv_proj": "query_key_value",
        "o_proj": "attention.dense",
        "up_proj": "dense_h_to_4h",
        "down_proj": "dense_4h_to_h",
        "embed_tokens": "embed_in",
    },
    "gptj": {"o_proj": "out_proj", "up_proj": "fc_in", "down_proj": "fc_out", "embed_tokens": "wte"},
    "mpt": {
        "qkv_proj": "Wqkv",
        "o_proj": "attn.out_proj",
        "up_proj": "ffn.up_proj",
        "down_proj": "ffn.down_proj",
        "embed_tokens": "wte",
    },
    "nemotron_h": {"embed_tokens": "embeddings"},
    "opt": {"o_proj": "out_proj", "up_proj": "fc1", "down_proj": "fc2"},
    "phi": {"o_proj": "self_attn.dense", "up_proj": "fc1", "down_proj": "fc2"},
    "nanochat": {"up_proj": "fc1", "down_proj": "fc2"},
    "starcoder2": {"up_proj": "mlp.c_fc", "down_proj": "mlp.c_proj"},
}


def module_name(spec: Spec, name: str) -> str:
    """Return the end of a layer's path in the modules that run."""
    family = spec.model.architecture if spec.training.implementation == "huggingface" else None
    return FAMILY_NAMES.get(family or "", {}).get(name, name)


def linear_layers(module: nn.Module, spec: Spec, names: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers with these names of the parameter table, and their paths, without stacked experts."""
    ends = tuple(f".{module_name(spec, name)}" for name in names)
    for path, part in module.named_modules():
        weight = getattr(part, "weight", None)
        if f".{path}".endswith(ends) and isinstance(weight, Tensor) and len(_shape(weight)) == len(("out", "in")):
            yield path, part


def quantizable_layers(module: nn.Module, spec: Spec) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers below the LM head, and their paths: those that bitsandbytes quantizes.

    Those of a model without formulas are what PEFT calls all-linear: all but the output layer.
    """
    if spec.model.transformers_config is None:
        yield from linear_layers(module, spec, adaptable_modules(spec.model, spec.training.implementation))
        if spec.model.vision_config is not None:
            yield from _linear_layers_of_tower(module)
        return
    classes = (nn.Linear, import_package("transformers").pytorch_utils.Conv1D)
    head = module.get_output_embeddings()  # type: ignore[operator]
    for path, part in module.named_modules():
        if isinstance(part, classes) and part is not head:
            yield path, part


def _linear_layers_of_tower(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers outside of the language model and the LM head, and their paths."""
    for path, part in module.named_modules():
        if isinstance(part, nn.Linear) and "language_model." not in path and not path.startswith(HEAD):
            yield path, part


def _adapted_paths(module: nn.Module, spec: Spec, lora: LoraSpec) -> list[str]:
    """Return the paths of the layers that get an adapter.

    Raises:
        InputError: a model without formulas has none of the listed layers.
    """
    if spec.model.transformers_config is None:
        names = adapted_modules(lora, spec.model, spec.training.implementation)
        return [path for path, _ in linear_layers(module, spec, names)]
    wanted = lora.target_modules
    there = [path for path, _ in quantizable_layers(module, spec)]
    if wanted == "all-linear":
        return there
    names = {"attention": ATTENTION_TARGETS, "mlp": MLP_TARGETS}[wanted] if isinstance(wanted, str) else wanted
    found = [path for path, _ in linear_layers(module, spec, names)]
    if not found:
        known = sorted({path.rpartition(".")[2] for path in there})
        raise InputError(*none_of_these(wanted, known), "training.lora.target_modules")
    return found


def _shape(weight: Tensor) -> torch.Size:
    """Return the shape of the full parameter: DeepSpeed's stage 3 replaces its tensor by an empty one."""
    shape: torch.Size = getattr(weight, "ds_shape", weight.shape)
    return shape


def add_adapters(module: nn.Module, spec: Spec) -> nn.Module:
    """Return the module wrapped by PEFT: only the adapters and `modules_to_save` are trained.

    Raises:
        Unavailable: PEFT is not installed.
        InputError: a model without formulas has none of the listed layers.
    """
    lora = spec.training.lora
    assert lora is not None
    if importlib.util.find_spec("peft") is None:
        raise Unavailable(f"finetune = lora needs PEFT, which is not installed. Run: {installation('peft')}")
    if importlib.util.find_spec("bitsandbytes") is not None:
        import_package("bitsandbytes")  # PEFT imports it when it creates an adapter
    peft: Any = import_package("peft")
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_adapted_paths(module, spec, lora),
        modules_to_save=[module_name(spec, name) for name in lora.modules_to_save] or None,
        fan_in_fan_out=spec.training.implementation == "huggingface" and spec.model.architecture == "gpt2",
    )
    with warnings.catch_warnings():  # PEFT 0.21 sets rank and alpha of fused experts, and warns if these get no adapter
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
        wrapped: nn.Module = peft.get_peft_model(module, config, autocast_adapter_dtype=lora.adapter_dtype == "fp32")
    if lora.adapter_dtype != "fp32":  # PEFT makes adapters in bnb_4bit_compute_dtype; programs cast them afterwards
        dtype = compute_dtype(spec.training) if lora.adapter_dtype == "compute" else torch.bfloat16
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype)
    _settle_input_gradient(module, spec, lora)
    return wrapped


def _settle_input_gradient(module: nn.Module, spec: Spec, lora: LoraSpec) -> None:
    """Set whether the embedding's output requires a gradient, overriding PEFT's choice."""
    if spec.model.transformers_config is None:
        name = module_name(spec, "embed_tokens")
        embedding = next(part for path, part in module.named_modules() if path.rpartition(".")[2] == name)
    else:
        embedding = module.get_input_embeddings()  # type: ignore[operator]
    embedding._forward_hooks.clear()  # noqa: SLF001 -- PEFT adds its hook twice and loses the first handle
    if lora.input_require_grads:
        embedding.register_forward_hook(_needs_gradient)


def _needs_gradient(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
    output.requires_grad_()
