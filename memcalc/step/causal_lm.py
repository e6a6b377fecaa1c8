"""What the training loop needs of a model, whoever wrote its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memcalc.errors import InputError
from memcalc.spec.foreign import has_published_formulas
from memcalc.spec.spec import Spec
from memcalc.step.adapters import add_adapters
from memcalc.step.decoder import Decoder
from memcalc.step.dtypes import weight_dtype
from memcalc.step.float8 import convert
from memcalc.step.losses import Head, tokenwise_loss, vocab_parallel
from memcalc.step.quantised import quantise


@dataclass(frozen=True, slots=True)
class CausalLM:
    """A decoder with its loss.

    Args:
        module: holds the parameters.
        logits: token ids (b, s) to logits (b, s, V).
        loss: logits and labels (b, s) to a scalar.
        surroundings: entered around forward and backward: settings of PyTorch that the modules leave to their caller.
        hidden: token ids to the hidden states (b, s, d) that the head reads, for losses that do without all logits.
        head: the output projection, looked up when it is needed.
        batch: makes the arguments of forward for a class that takes other inputs than tokens and labels; `logits` then
            takes them, and returns an output with its loss.
    """

    module: nn.Module
    logits: Callable[[Any], Any]
    loss: Callable[[Any, Tensor], Tensor]
    surroundings: Callable[[], AbstractContextManager[None]] = nullcontext
    hidden: Callable[[Tensor], Tensor] | None = None
    head: Head | None = None
    batch: Callable[[], dict[str, Tensor]] | None = None


def build(spec: Spec, device: torch.device, *, place: torch.device | None = None) -> CausalLM:
    """The model of the spec with random weights, for the device, in the dtype that the recipe keeps weights in.

    With the adapters and the 4-bit matrices that the spec asks for. They are made on `place`, if that is another one.

    Raises:
        InputError: the implementation cannot be run here, or does not know the model.
        Unavailable: PEFT, bitsandbytes or torchao is missing.
    """
    quantised = spec.training.finetune == "qlora"
    model = build_base(spec, torch.device("meta") if quantised else place or device, device)
    if quantised:
        quantise(model.module, spec, device)
    if spec.training.lora is not None:
        model = replace(model, module=add_adapters(model.module, spec))
    if spec.training.fp8 != "none":
        convert(model.module, spec)
    return with_loss(model, spec)


def with_loss(model: CausalLM, spec: Spec) -> CausalLM:
    """The model with the loss that the spec asks for in place of its own."""
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
    """The model's output converted to fp32 (Lightning Fabric, plugins/precision/utils.py, _convert_fp_tensor)."""
    found = logits(input_ids)
    if isinstance(found, Tensor):
        return found.float()
    found.logits = found.logits.float()
    return found


def build_base(spec: Spec, place: torch.device, device: torch.device) -> CausalLM:
    """The model without adapters, its weights on `place`, to be run on `device`."""
    if not has_published_formulas(spec.model):
        from memcalc.step.any_model import build_any  # as below

        return build_any(spec, place, device)
    if spec.training.implementation == "huggingface":
        # Imported here: transformers is an extra of its own, and takes seconds.
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
    """Cross-entropy in fp32. A function of its own, so that the fp32 logits lose their name when it returns."""
    return functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))


def loss_as_returned(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of the logits in the dtype that they have."""
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New floating-point tensors have this dtype inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
