"""Weights are made on the device: the host never holds a copy of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from memcalc.spec.loading import load
from memcalc.step.causal_lm import build

MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 32}


class Results(TorchDispatchMode):
    """Recorder of the results of every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tensors += [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        return result


@pytest.mark.parametrize("finetune", ["full", "lora"])
@pytest.mark.parametrize("implementation", ["plain", "huggingface"])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_weights_are_made_where_they_stay(architecture: str, implementation: str, finetune: str) -> None:
    training = {"sequence_length": 32, "implementation": implementation, "recipe": "pure", "finetune": finetune}
    spec = load({"model": MODEL | {"architecture": architecture}, "training": training})
    with Results() as made:
        module = build(spec, torch.device("meta")).module

    whole = sum(parameter.numel() for parameter in module.parameters())
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert sum(tensor.numel() for tensor in made.tensors if tensor.device.type == "meta") >= whole
    # Beside them numbers, and the positions that transformers keeps on the host: no matrix.
    assert max((tensor.numel() for tensor in made.tensors if tensor.device.type != "meta"), default=0) < 64 * 64
