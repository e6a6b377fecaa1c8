"""Weights without values: allocated but not initialized, instead of initialized or read from files."""

from __future__ import annotations

import copy
import os
import sys
from typing import Any, Callable  # noqa: UP035 -- for Python 3.9

# ruff: noqa: INP001 -- a directory on PYTHONPATH, not a package

LARGE = 1 << 20  # elements: larger CPU tensors are not filled with random values under --skip-init

# Arguments of from_pretrained about loading, although a config has attributes of some of these names.
ABOUT_LOADING = frozenset(
    "dtype torch_dtype quantization_config device_map max_memory attn_implementation experts_implementation "
    "output_loading_info generation_config distributed_config tp_plan tp_size device_mesh".split()
)


def skip_initialization(torch: Any) -> None:
    """Leave weights uninitialized: untouched pages use no memory."""

    def unchanged(tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    init = torch.nn.init
    names = [name for name in vars(init) if name.endswith("_") and not name.startswith("_")]
    helpers = [name for name in vars(init) if name.startswith("_no_grad_")]
    for name in names + helpers:
        original = getattr(init, name)
        setattr(init, name, unchanged)
        for module in list(sys.modules.values()):  # modules that have imported the function by name
            if getattr(module, "__name__", "").startswith("torch.nn") and vars(module).get(name) is original:
                setattr(module, name, unchanged)
    for name in ("normal_", "uniform_"):  # models also fill weights without torch.nn.init
        original = getattr(torch.Tensor, name)

        def fill(tensor: Any, *rest: Any, original: Callable[..., Any] = original, **named: Any) -> Any:
            large = tensor.device.type == "cpu" and tensor.numel() > LARGE
            return tensor if large else original(tensor, *rest, **named)

        setattr(torch.Tensor, name, fill)


def replace_from_pretrained(modeling: Any) -> None:
    """Give transformers' from_pretrained weights made from the config alone, instead of files.

    All other steps of loading are transformers' own: dtypes, device maps, quantization, tied weights.
    """
    base = modeling.PreTrainedModel
    original = base.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, *rest: Any, config: Any = None, **named: Any) -> Any:
        if name is None or named.get("state_dict") is not None or named.get("gguf_file") is not None:
            return original(cls, name, *rest, config=config, **named)
        if config is None or isinstance(config, (str, os.PathLike)):
            ours = {word: named.pop(word) for word in ABOUT_LOADING & named.keys()}
            config, named = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **named)
            named.update(ours)
        weights = random_state_dict(cls, config, *rest)
        loaded = original(cls, None, *rest, config=config, state_dict=weights, **named)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.name_or_path = model.config.name_or_path = str(name)  # programs look for the tokenizer there
        return loaded

    base.from_pretrained = classmethod(from_pretrained)  # type: ignore[arg-type]


def random_state_dict(cls: Any, config: Any, *rest: Any) -> dict[str, Any]:
    """Return the state dict of this model's checkpoint, in the dtype of its config; its memory is never written."""
    torch = sys.modules["torch"]
    former = torch.get_default_dtype()
    dtype = getattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", None) or torch.float32
    torch.set_default_dtype(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    try:
        with torch.device("meta"):
            state = cls(copy.deepcopy(config), *rest).state_dict(keep_vars=True)
    finally:
        torch.set_default_dtype(former)
    once = {id(tensor): name for name, tensor in reversed(state.items())}  # tied weights are stored under one name
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        for name, tensor in state.items()
        if once[id(tensor)] == name
    }
