"""Scales of fake quantization, which its modules keep from one pass to the next."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.fake_quantized_layers import fake_quantized_chunks, fake_quantized_layers
from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, from_phase
from memcalc.spec.spec import Spec

SOURCE = "torchao 0.13 quantization/qat/fake_quantizer.py: IntxFakeQuantizer.scale, zero_point"


def scales_of_layers(spec: Spec, parameters: LocalParameters) -> Iterator[RowDraft]:
    """Yield an fp32 scale and a zero point for each group of a weight, and for each token of a layer's input.

    Every rank has those of whole weights; ranges with gradients are not kept. A pass replaces those of the pass before.
    The scales of a layer that runs on several chunks are counted with what it saves for backward.
    """
    training, layers, chunked = spec.training, fake_quantized_layers(spec), fake_quantized_chunks(spec)
    for parameter in parameters:
        name = parameter.module.rpartition(".")[2]
        if name not in layers or parameter.tensor != "weight":
            continue
        rows, columns = parameter.shape
        of_weight = (rows, columns // training.fake_quantization_group)
        tokens = training.row_length // (training.loss_chunks if name in chunked else 1)
        what = "zero points" if name in chunked else "scales and zero points"
        each = 1 if name in chunked else 2
        if training.fake_quantization == "int8-int4":
            yield _kept(parameter, f"{what} of the weight", of_weight, each, f"4·({parameter.formula})/g")
        formula = "4·b·s/m" if name in chunked else "4·b·s"
        yield _kept(parameter, f"{what} of the input", (training.sequences, tokens), each, formula)


def _kept(parameter: LocalParameter, name: str, shape: tuple[int, ...], count: int, formula: str) -> RowDraft:
    each = 4 * shape[0] * shape[1]
    given = (each, rounded(each), from_phase("forward_1"), formula, SOURCE)
    return RowDraft(Component.WEIGHTS, parameter.module, name, shape, "fp32", count * parameter.count, *given)
