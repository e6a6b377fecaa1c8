"""Requests of bitsandbytes while it quantizes linear layers to 4 bits.

Sources: bitsandbytes 0.50 functional.py, quantize_4bit, get_4bit_type and quantize_blockwise; backends/cuda/ops.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter
from memcalc.layout.peft_parameters import CODE_4_BIT, CODE_8_BIT, SCALES_PER_SCALE
from memcalc.simulation.construction.initial_tensors import InitialTensor, InitialTensors
from memcalc.spec.finetuning import QloraSpec, base_dtype
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.workspaces import Script, ceil_div

FP32 = DTYPE_BYTES["fp32"]
WIDE = "wide"  # the group of what is freed once its narrow copy exists


class QuantizedModule(NamedTuple):
    """The frozen parameters of one module.

    Args:
        mask: the phases in which they are live.
        made: the weights of each parameter; of the second one on, scales and code tables are part of the first.
        wide: bytes of the matrix before quantization; 0: the module has no 4-bit matrix.
        script: requests of its quantization.
        others: parameters that are not quantized, such as a bias.
        unsharded: whether engines leave the packed elements whole.
        name: of the module.
    """

    mask: int
    made: list[tuple[InitialTensors, ...]]
    wide: int = 0
    script: Script = ()
    others: tuple[InitialTensors, ...] = ()
    unsharded: bool = False
    name: str = ""


def in_4_bits(
    spec: Spec, ordered: Sequence[LocalParameter], weights: Iterable[tuple[InitialTensors, ...]]
) -> Iterator[tuple[InitialTensors, ...]]:
    """Yield the weights of each parameter; a quantized weight, its quantization state and its bias are one item.

    Args:
        spec: a run with a 4-bit base.
        ordered: its frozen parameters in registration order; scales and code tables follow a packed weight.
        weights: the weights of each parameter.
    """
    for module in quantized_modules(spec, ordered, weights):
        if not module.wide:
            yield from module.made
            continue
        bias = sum(made.size for built in module.others for made in built.tensors)
        script = (module.wide, *module.script, *((bias,) if bias else ()), -module.wide)
        yield (InitialTensors(module.mask, (InitialTensor(0, several=script),)),)
        yield from ((),) * (len(module.made) - 1)


def loaded_in_4_bits(
    spec: Spec, ordered: Sequence[LocalParameter], weights: Iterable[tuple[InitialTensors, ...]], until: int
) -> Iterator[tuple[InitialTensors, ...]]:
    """Yield each module of a base that an engine shards afterwards.

    What the engine shards is live in the phases `until`, the rest stays.

    Args:
        spec: a run with a 4-bit base.
        ordered: its frozen parameters in registration order; scales and code tables follow a packed weight.
        weights: the unsharded weights of each parameter.
        until: bit set of phases.
    """
    for module in quantized_modules(spec, ordered, weights):
        if not module.wide:
            yield tuple(built._replace(mask=until) for made in module.made for built in made)
            continue
        scales, packed, *rest = module.script
        nested = rest[-1] == -scales
        if nested:  # its scales are quantized, too
            rest.pop()
        yield (
            InitialTensors(until, (InitialTensor(module.wide),), groups=(WIDE,)),
            InitialTensors(until if nested else module.mask, (InitialTensor(scales),), groups=(WIDE,) * nested),
            InitialTensors(module.mask if module.unsharded else until, (InitialTensor(packed),)),
            InitialTensors(module.mask, (InitialTensor(0, several=tuple(rest)),), frees=WIDE),
            *(built._replace(mask=until) for built in module.others),
        )


def quantized_modules(
    spec: Spec, ordered: Sequence[LocalParameter], weights: Iterable[tuple[InitialTensors, ...]]
) -> Iterator[QuantizedModule]:
    """Yield the modules with their frozen parameters, in order.

    Args:
        spec: a run with a 4-bit base.
        ordered: its frozen parameters; scales and code tables follow a packed weight.
        weights: the weights of each parameter.
    """
    qlora = spec.training.qlora
    assert qlora is not None
    wide = DTYPE_BYTES[base_dtype(spec.training)]
    shared = FP32 * CODE_8_BIT if qlora.double_quantization else 0  # allocated with the first weight, shared by all
    for _, found in groupby(zip(ordered, weights, strict=True), key=lambda each: each[0].module):
        (first, made), *rest = found
        every = [made, *(built for _, built in rest)]
        if not any(parameter.beside for parameter, _ in rest):
            yield QuantizedModule(0, every)
            continue
        elements = 2 * made[0].tensors[0].size
        others = tuple(built[0] for parameter, built in rest if not parameter.beside)
        script = _matrix(elements, qlora, shared)
        yield QuantizedModule(made[0].mask, every, elements * wide, script, others, first.beside, first.module)
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
