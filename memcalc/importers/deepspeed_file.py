"""DeepSpeed's file as Hugging Face's Trainer, axolotl, LLaMA-Factory and Accelerate name it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memcalc.errors import InputError
from memcalc.files import read_text
from memcalc.frameworks.deepspeed import is_pytorchs_adam, place_groups, place_own_adam, place_zero
from memcalc.frameworks.draft import Draft, is_on
from memcalc.importers.deepspeed import OPTIMIZERS
from memcalc.spec.limits import Limit

_STAGE = re.compile(r"z(?:ero)?[_-]?(?:stage)?[_-]?([0-3])", re.IGNORECASE)


def place_deepspeed(draft: Draft, deepspeed: Any) -> int | None:
    """Set optimizer and offload from the DeepSpeed file or the inline block, in addition to the Trainer's arguments.

    Returns:
        ZeRO's stage; None if nothing sets it.
    """
    config = deepspeed
    if isinstance(deepspeed, str):
        config = read_referenced(draft.directory, deepspeed)
        if config is None:
            if "offload" in deepspeed.lower():
                draft.notes.append(
                    f"{deepspeed} may offload, which is counted in device memory; change it with --set offload="
                )
            draft.limits.append(Limit("a DeepSpeed config that cannot be read", holds_memory=True, overcounts="all"))
            found = _STAGE.search(deepspeed.rpartition("/")[2])
            if found is None:
                draft.notes.append(f"{deepspeed} cannot be read; set the stage with --set zero_stage=")
                return None
            draft.notes.append(f"{deepspeed} cannot be read; assuming stage {found[1]}, as in the name")
            return int(found[1])
    if not isinstance(config, Mapping):
        return None
    _note_mismatch(draft, config)
    _place_deepspeeds_optimizer(draft, config)
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    offload = {name: _device(zero.get(f"offload_{name}")) for name in ("optimizer", "param")}
    draft.facts["offload"], draft.facts["offload_param"] = offload["optimizer"], offload["param"]
    place_zero(draft, zero)
    place_groups(draft, config)
    stage = zero.get("stage", 0)
    place_own_adam(draft, config.get("optimizer"), stage)
    return stage if type(stage) is int and 0 <= stage <= 3 else None


def read_referenced(folder: str, name: str) -> Any:
    """Return a JSON file by its path relative to this directory or one above, where programs are started; else None."""
    path = find_referenced(folder, name)
    try:
        return None if path is None else json.loads(read_text(path))
    except (InputError, ValueError, RecursionError):
        return None


def find_referenced(folder: str, name: str) -> Path | None:
    """Return a file by its path relative to this directory or one above, where programs are started; else None."""
    try:
        start = Path(folder).resolve()
        return next((each / name for each in (start, *start.parents) if (each / name).is_file()), None)
    except (OSError, ValueError):
        return None


def _place_deepspeeds_optimizer(draft: Draft, config: Mapping[str, Any]) -> None:
    """Let the optimizer of DeepSpeed's own file override the Trainer's (integrations/deepspeed.py).

    With `torch_adam` it is PyTorch's Adam, with PyTorch's defaults.
    """
    block = config.get("optimizer")
    name = str(block.get("type", "")).lower() if isinstance(block, Mapping) else ""
    if name not in OPTIMIZERS:
        return
    if OPTIMIZERS[name] not in ("adam", "adamw"):
        draft.values["training.optimizer"] = OPTIMIZERS[name]
        draft.values.pop("training.optimizer_implementation", None)
        return
    draft.values["training.optimizer"] = "adamw"
    draft.values["training.optimizer_implementation"] = "foreach" if is_pytorchs_adam(block) else "fused"


def _note_mismatch(draft: Draft, config: Mapping[str, Any]) -> None:
    """Note two different precisions, which transformers rejects (integrations/deepspeed.py)."""
    for name in ("bf16", "fp16"):
        block = config.get(name)
        said = block.get("enabled") if isinstance(block, Mapping) else None
        if said is True and not is_on(draft.facts.get(name)):
            draft.notes.append(
                f"DeepSpeed's {name}.enabled is true and {name} is not: transformers rejects both, and the "
                "precision of its own arguments is counted"
            )


def _device(offload: object) -> object:
    return offload.get("device") if isinstance(offload, Mapping) else None
