"""Frozen weights that a program casts to fp32 and back while it loads the model."""

from __future__ import annotations

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.local_parameters import LocalParameter, stage_parameters
from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, mask_of
from memcalc.spec.finetuning import base_dtype
from memcalc.spec.fp32_modules import in_fp32
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec

SOURCE = "axolotl 0.19 loaders/model.py, _convert_embedding_modules_dtype"


def is_upcast(spec: Spec, parameter: LocalParameter) -> bool:
    """Return whether a weight is cast to fp32 and back: one in another dtype, of a module of `lora.fp32_on_load`."""
    lora = spec.training.lora
    modules = () if lora is None or base_dtype(spec.training) == "fp32" else lora.fp32_on_load
    return in_fp32(parameter.module, modules)


def upcast_weights(spec: Spec, stage: Stage) -> list[RowDraft]:
    """Return the bytes of the casts beyond the weights themselves, and beyond the adapters, which are made afterwards.

    Modules are cast one at a time. At the peak all are in fp32, and one is also in its own dtype.
    """
    parameters = stage_parameters(spec, stage)
    chosen = [each for each in parameters if is_upcast(spec, each)]
    if not chosen:
        return []
    narrow, wide = DTYPE_BYTES[base_dtype(spec.training)], DTYPE_BYTES["fp32"]
    total = sum(each.count * each.elements for each in chosen)
    adapters = sum(DTYPE_BYTES[each.dtype or "fp32"] * each.count * each.elements for each in parameters if each.adapts)
    size = (wide - narrow) * total + narrow * max(each.elements for each in chosen) - adapters
    if size <= 0:
        return []
    given = (size, rounded(size), mask_of("model"), f"{wide - narrow}·P_fp32 + {narrow}·V·d - {wide}·P_lora", SOURCE)
    return [RowDraft(Component.TEMPORARIES, "model", "weights in fp32 and back", (size,), "uint8", 1, *given)]
