"""Interface of a model to the training loop."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memcalc.errors import InputError, Unavailable
from memcalc.extras import installation
from memcalc.spec.model_families.transformers_fallback import has_published_formulas
from memcalc.spec.spec import Spec
from memcalc.step.adapters import add_adapters, module_name
from memcalc.step.dtypes import weight_dtype
from memcalc.step.losses import Head, tokenwise_loss, vocab_parallel
from memcalc.step.quantization import quantize
from memcalc.step.reference.decoder import Decoder


@dataclass(frozen=True, slots=True)
class CausalLM:
    """A decoder with its loss."""

    module: nn.Module  # has the parameters
    logits: Callable[[Any], Any]  # token ids (b, s) to logits (b, s, V)
    loss: Callable[[Any, Tensor], Tensor]  # logits and labels (b, s) to a scalar
    # context of forward and backward: PyTorch settings that the modules leave to their caller
    contexts: Callable[[], AbstractContextManager[None]] = nullcontext
    # token ids to the LM head's input (b, s, d), for losses that do not need all logits
    hidden: Callable[[Tensor], Tensor] | None = None
    head: Head | None = None  # returns the LM head; called when it is needed
    # makes the arguments of forward for a class with other inputs than tokens and labels; `logits` then takes them, and
    # returns an output with its loss
    batch: Callable[[], dict[str, Tensor]] | None = None


def build(spec: Spec, device: torch.device, *, place: torch.device | None = None) -> CausalLM:
    """Return the model of the spec with random weights, in the dtype in which the recipe keeps weights.

    It has the adapters and 4-bit weights that the spec requests. Its weights are allocated on `place` if given, else on
    the device.

    Raises:
        InputError: the implementation cannot run here, or does not support the model.
        Unavailable: PEFT, bitsandbytes or torchao is missing.
    """
    quantized = spec.training.finetune == "qlora"
    model = build_base(spec, torch.device("meta") if quantized else place or device, device)
    if quantized:
        quantize(model.module, spec, device)
    if spec.training.lora is not None:
        model = replace(model, module=add_adapters(model.module, spec))
    if spec.training.fp8 != "none":
        convert(model.module, spec)
    return with_loss(model, spec)


def with_loss(model: CausalLM, spec: Spec) -> CausalLM:
    """Return the model with the loss that the spec requests."""
    kind = spec.training.loss
    if kind == "vocab-parallel":
        return replace(model, loss=vocab_parallel)
    if spec.training.logits_dtype == "fp32":
        model = replace(model, logits=partial(_in_fp32, model.logits))
    if kind == "materialized":
        return model if spec.training.loss_upcast else replace(model, loss=loss_as_returned)
    assert model.hidden is not None
    assert model.head is not None
    return replace(model, logits=model.hidden, loss=tokenwise_loss(spec.training, model.head))


def _in_fp32(logits: Callable[[Tensor], Any], input_ids: Tensor) -> Any:
    """Return the model's output upcast to fp32 (Lightning Fabric, plugins/precision/utils.py, _convert_fp_tensor)."""
    found = logits(input_ids)
    if isinstance(found, Tensor):
        return found.float()
    found.logits = found.logits.float()
    return found


def build_base(spec: Spec, place: torch.device, device: torch.device) -> CausalLM:
    """Return the model without adapters, with weights on `place`, to be run on `device`."""
    if not has_published_formulas(spec.model):
        from memcalc.step.any_model import build_any  # as below

        return build_any(spec, place, device)
    if spec.training.implementation == "huggingface":
        # transformers is an optional dependency, and takes seconds to import.
        from memcalc.step.huggingface import build_huggingface

        return build_huggingface(spec, place, device)
    if spec.training.implementation != "plain":
        raise InputError(
            f"implementation = {spec.training.implementation} cannot be run.",
            "Set training.implementation: plain or huggingface.",
            "training.implementation",
        )
    with place, default_dtype(weight_dtype(spec.training)):
        decoder = Decoder(spec)
    return CausalLM(decoder, decoder, loss, hidden=decoder.hidden, head=lambda: decoder.lm_head)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the fp32 cross-entropy. In a function, so that no variable references the fp32 logits when it returns."""
    return functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))


def loss_as_returned(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of the logits in their own dtype."""
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the dtype of new floating-point tensors inside the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


RECIPES = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise-gw-hp": "rowwise_with_gw_hp"}


def convert(module: nn.Module, spec: Spec) -> nn.Module:
    """Replace every nn.Linear that the spec does not skip by Float8Linear, in place; return the module.

    Raises:
        Unavailable: torchao is not installed.
    """
    if importlib.util.find_spec("torchao") is None:
        raise Unavailable(f"fp8 needs torchao, which is not installed. Run: {installation('torchao')}")
    float8: Any = importlib.import_module("torchao.float8")
    training = spec.training
    config = float8.Float8LinearConfig.from_recipe_name(RECIPES[training.fp8])
    if training.fp8_all_gather:
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    skipped = [module_name(spec, name) for name in training.fp8_skip]

    def wanted(_: nn.Module, path: str) -> bool:
        return not any(name in path for name in skipped)

    converted: nn.Module = float8.convert_to_float8_training(module, module_filter_fn=wanted, config=config)
    return converted
