"""Requests of bitsandbytes while it quantizes linear layers to 4 bits.

Sources: bitsandbytes 0.50 functional.py, quantize_4bit, get_4bit_type and quantize_blockwise; backends/cuda/ops.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from memcalc.layout.adapters import base_dtype
from memcalc.layout.local_parameters import LocalParameter
from memcalc.layout.peft_parameters import CODE_4_BIT, CODE_8_BIT, SCALES_PER_SCALE
from memcalc.simulation.initial_tensors import InitialTensor, InitialTensors
from memcalc.spec.finetuning import QloraSpec
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.workspaces import Script, ceil_div

FP32 = DTYPE_BYTES["fp32"]


def in_4_bits(
    spec: Spec, ordered: Sequence[LocalParameter], weights: Iterable[tuple[InitialTensors, ...]]
) -> Iterator[tuple[InitialTensors, ...]]:
    """Yield the weights of each parameter; a quantized weight, its quantization state and its bias are one item.

    Args:
        spec: a run with a 4-bit base.
        ordered: its frozen parameters in registration order; scales and code tables follow a packed weight.
        weights: the weights of each parameter.
    """
    qlora = spec.training.qlora
    assert qlora is not None
    wide = DTYPE_BYTES[base_dtype(spec.training)]
    shared = FP32 * CODE_8_BIT if qlora.double_quantization else 0  # allocated with the first weight, shared by all
    for _, found in groupby(zip(ordered, weights, strict=True), key=lambda each: each[0].module):
        parts = list(found)
        if not any(parameter.beside for parameter, _ in parts):
            yield from (built for _, built in parts)
            continue
        packed, *others = [built[0] for parameter, built in parts if not parameter.beside]
        elements = 2 * packed.tensors[0].size
        bias = sum(made.size for built in others for made in built.tensors)
        whole = elements * wide
        script = (whole, *_matrix(elements, qlora, shared), *((bias,) if bias else ()), -whole)
        yield (InitialTensors(packed.mask, (InitialTensor(0, several=script),)),)
        yield from () if len(parts) == 1 else ((),) * (len(parts) - 1)
        shared = 0


def _matrix(elements: int, qlora: QloraSpec, shared: int) -> Script:
    """Return quantize_4bit of one weight: scales, packed elements, the 4-bit code table, and quantized scales."""
    scales, table = FP32 * ceil_div(elements, qlora.block_size), FP32 * CODE_4_BIT
    made = (scales, elements // 2, table, table, FP32, -table, -FP32)  # the code is divided by its maximum
    if not qlora.double_quantization:
        return made
    blocks = ceil_div(elements, qlora.block_size)
    mean, around_zero = FP32, scales
    first = (shared,) if shared else ()
    scales_of_scales = FP32 * ceil_div(blocks, SCALES_PER_SCALE)
    kept = (scales_of_scales, blocks, FP32 * CODE_8_BIT)
    return (*made, mean, around_zero, *first, *kept, -around_zero, -scales)
