"""Which layers are recomputed, and that it changes memory but no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memcalc.spec.loading import load
from memcalc.step.causal_lm import build
from memcalc.step.recompute import recomputed_layers

TINY = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 32}


def spec(recompute: Any) -> Any:
    training = {"sequence_length": 32, "recompute": recompute, "attention": "eager", "dtype": "fp32", "recipe": "fp32"}
    return load({"model": TINY, "training": training | {"dropout": 0.1}})


@pytest.mark.parametrize(
    ("recompute", "layers"),
    [
        ("none", set()),
        ("selective", set()),
        ("full", {0, 1, 2, 3}),
        ("every-1", {0, 1, 2, 3}),
        ("every-2", {1, 3}),
        ("every-3", {2}),
        ([0, 3], {0, 3}),
    ],
)
def test_the_layers_of_each_plan(recompute: Any, layers: set[int]) -> None:
    assert recomputed_layers(spec(recompute).training, 4) == layers


def step(recompute: Any) -> tuple[int, list[Any]]:
    """Bytes that autograd keeps of a forward, and the gradients, with the same weights and dropout each time."""
    torch.manual_seed(0)
    model = build(spec(recompute), torch.device("cpu"))
    tokens = torch.randint(96, (1, 32))
    known = {p.untyped_storage().data_ptr() for p in model.module.parameters()}
    found: dict[int, int] = {}
    kept = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found_loss = model.loss(model.logits(tokens), tokens)
    found_loss.backward()
    return sum(found.values()), [p.grad for p in model.module.parameters()]


def test_more_recompute_keeps_less_and_gives_the_same_gradients() -> None:
    kept, gradients = zip(*(step(plan) for plan in ("none", "selective", "every-2", "full")), strict=True)

    assert kept[0] > kept[1] > kept[3]
    assert kept[0] > kept[2] > kept[3]
    for other in gradients[1:]:
        for expected, found in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(found, expected)
