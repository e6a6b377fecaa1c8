"""The recipe table: copies of weights and gradients, with their dtypes and lifetimes.

It is the table of INTERFACE ("Recipes"); estimate, step and report use this one copy.
Sources: ZeRO (arXiv 1910.02054) for 16, Megatron-LM's bf16 optimizer for 18, MT-NLG (arXiv 2201.11990) for 20.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Dtype = Literal["fp32", "bf16", "fp16"]

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "bool": 1, "int64": 8, "int32": 4, "uint8": 1}


class Recipe(NamedTuple):
    """Dtypes by role; "compute" is training.dtype."""

    weights: str
    gradients: str | None  # autograd's gradients, live from backward to zero_grad; None: transient
    main_gradients: str | None  # the additional fp32 copy
    main_gradients_live: str  # "never" | "always" | "backward" (to zero_grad) | "step" (allocated and freed in it)
    master: str | None  # the copy that the optimizer updates, persistent
    moments: str
    autocast: bool
    textbook_bytes: int  # bytes per parameter under Adam, as published
    imitates: str


RECIPES: dict[str, Recipe] = {
    "fp32": Recipe("fp32", "fp32", None, "never", None, "fp32", False, 16, "plain PyTorch"),
    "fp32-main": Recipe("fp32", None, "fp32", "always", None, "fp32", False, 16, "Megatron-LM fp32"),
    "amp": Recipe("fp32", "fp32", None, "never", None, "fp32", True, 16, "torch.autocast"),
    "pure": Recipe(
        "compute", "compute", None, "never", None, "compute", False, 8, "weights, gradients and states in dtype"
    ),
    "mixed-16": Recipe("compute", "compute", "fp32", "step", "fp32", "fp32", False, 16, "the ZeRO paper's count"),
    "mixed-18": Recipe("compute", None, "fp32", "always", "fp32", "fp32", False, 18, "Megatron-LM bf16"),
    "mixed-20": Recipe("compute", "compute", "fp32", "backward", "fp32", "fp32", False, 20, "the MT-NLG count"),
}

ALIASES = {"zero": "mixed-16", "megatron": "mixed-18", "mt-nlg": "mixed-20"}
