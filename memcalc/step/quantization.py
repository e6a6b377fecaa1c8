"""A model with weights quantized to 4 bits by bitsandbytes, built as transformers loads one: one matrix at a time."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memcalc.errors import Unavailable
from memcalc.extras import installation
from memcalc.spec.finetuning import HEAD, packing_dtype
from memcalc.spec.spec import Spec
from memcalc.step.adapters import linear_layers, quantizable_layers
from memcalc.step.dtypes import DTYPES, compute_dtype
from memcalc.step.packages import import_package


def quantize(module: nn.Module, spec: Spec, device: torch.device) -> None:
    """Allocate the weights of a module on the meta device on a real device, with linear layers 4-bit quantized.

    Each weight exists in bf16 or fp16 only until it is quantized.

    Raises:
        Unavailable: bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Unavailable(f"finetune = qlora needs bitsandbytes, which is not installed. Run: {installation('peft')}")
    qlora = spec.training.qlora
    assert qlora is not None
    chosen = dict(quantizable_layers(module, spec))
    kept = () if spec.training.lora is None else spec.training.lora.modules_to_save
    if qlora.quantize_lm_head and not spec.model.tie_word_embeddings and HEAD not in kept:
        chosen |= dict(linear_layers(module, spec, (HEAD,)))
    materialized: dict[Tensor, nn.Parameter] = {}
    for path, part in list(module.named_modules()):
        if path in chosen:
            _replace(module, path, _in_4_bits(part, spec, device))
        else:
            _materialize(part, device, materialized)
    module.is_loaded_in_4bit = True  # type: ignore[assignment]  # PEFT chooses its 4-bit adapters by it


def quantized_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the additional tensors of quantized weights: scales and code tables."""
    for parameter in module.parameters():
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            yield from (value for value in vars(state).values() if isinstance(value, Tensor))
            state = state.state2


def elements(parameter: nn.Parameter) -> int:
    """Return the elements of a parameter; for a quantized one, of the weight before quantization."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(torch.Size(state.shape).numel())


PACKED = DTYPES | {"uint8": torch.uint8}


def _in_4_bits(part: nn.Module, spec: Spec, device: torch.device) -> nn.Module:
    bitsandbytes: Any = import_package("bitsandbytes")
    qlora = spec.training.qlora
    assert qlora is not None
    weight = part.weight
    assert isinstance(weight, Tensor)
    # Conv1D of transformers (GPT-2) stores its weight as [in, out]; a linear layer replaces it.
    outputs, inputs = weight.shape if isinstance(part, nn.Linear) else reversed(weight.shape)
    asked = qlora.compute_dtype
    multiplied = compute_dtype(spec.training) if asked is None else DTYPES[asked]
    linear: nn.Module = bitsandbytes.nn.Linear4bit(
        inputs, outputs, bias=part.bias is not None, compute_dtype=multiplied, device="meta"
    )
    whole = torch.empty(outputs, inputs, dtype=weight.dtype, device=device).normal_(std=0.02)
    linear.weight = bitsandbytes.nn.Params4bit(
        whole,
        requires_grad=False,
        quant_type=qlora.quantization,
        compress_statistics=qlora.double_quantization,
        blocksize=qlora.block_size,
        quant_storage=PACKED[packing_dtype(spec.training, spec.parallelism)],
        module=linear,
    ).to(device)
    if part.bias is not None:
        linear.bias = nn.Parameter(torch.zeros(outputs, dtype=weight.dtype, device=device))
    return linear


def _materialize(part: nn.Module, device: torch.device, materialized: dict[Tensor, nn.Parameter]) -> None:
    """Replace tensors on the meta device by random weights and zero buffers; tied weights stay tied."""
    for name, parameter in part.named_parameters(recurse=False):
        if parameter.is_meta and parameter not in materialized:
            materialized[parameter] = nn.Parameter(torch.empty_like(parameter, device=device).normal_(std=0.02))
        setattr(part, name, materialized.get(parameter, parameter))
    for name, buffer in part.named_buffers(recurse=False):
        if buffer.is_meta:
            setattr(part, name, torch.zeros_like(buffer, device=device))


def _replace(module: nn.Module, path: str, new: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, new)


def sizes_of(module: nn.Module) -> tuple[int, int, int]:
    """Return the elements of parameters, trained parameters and buffers; quantized weights by their original shape."""
    parameters = list(module.parameters())
    return (
        sum(elements(parameter) for parameter in parameters),
        sum(elements(parameter) for parameter in parameters if parameter.requires_grad),
        sum(buffer.numel() for buffer in module.buffers()),
    )
