"""Replacement of linear layers by torchao's, which compute matmuls in FP8."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from torch import nn

from memcalc.errors import Unavailable
from memcalc.extras import installation
from memcalc.spec.spec import Spec
from memcalc.step.adapters import module_name

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
