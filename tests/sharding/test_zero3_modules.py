"""The order of modules under DeepSpeed's stage 3, compared with the calls of transformers' own modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from memcalc.architectures.huggingface.catalogue import FAMILIES
from memcalc.sharding.deepspeed import lacks
from memcalc.sharding.zero3 import ZeRO3
from memcalc.simulation.plans import plan_of
from memcalc.simulation.simulated_run import SimulatedRun
from memcalc.spec.loading import load
from memcalc.spec.spec import Spec
from memcalc.stream.requests import Requests
from tests.spec.test_inverse import small_model

# DEFAULT_LEAF_MODULE_CLASSES in DeepSpeed 0.19 runtime/zero/leaf_module_config.py.
HOOKED_WHOLE = ("MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock")
QUICK = ("gpt2", "gpt_oss", "llama", "opt", "phi", "qwen3_moe")
NOT_BUILT = ("deepseek_v3",)  # transformers has no such small model


def run_of(family: str, **training: Any) -> Spec:
    model = small_model(family).model_dump(exclude_defaults=True)
    own = {"sequence_length": 16, "implementation": "huggingface", "dropout": 0.0}
    return load({"model": model, "training": own | training, "parallelism": {}})


def sharded(family: str) -> Spec:
    spec = run_of(family, recipe="mixed-16")
    parallelism = spec.parallelism.model_copy(update={"engine": "deepspeed", "zero_stage": 3, "data_parallel": 2})
    return load(spec.model_copy(update={"parallelism": parallelism}).model_dump(exclude_defaults=True))


def ordered_families() -> list[str]:
    """The families with a known order of modules."""
    return [family for family in sorted(FAMILIES) if family not in NOT_BUILT and not any(lacks_of(family))]


def lacks_of(family: str) -> Iterator[str]:
    spec = sharded(family)
    return lacks(spec, plan_of(spec))


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in QUICK else pytest.mark.long) for each in sorted(FAMILIES)]
)
def test_modules_run_in_the_order_of_transformers(family: str) -> None:
    """Elements of the parameters of each module that is called, in order; 0: a module without parameters."""
    if family in NOT_BUILT or any(lacks_of(family)):
        pytest.skip("the order is not modelled")
    engine = SimulatedRun(sharded(family), Requests()).engine
    assert isinstance(engine, ZeRO3)
    turns = [turn for turn in engine.turns if not turn.backward]

    assert [sum(engine.elements[number] for number in turn.parameters) for turn in turns] == calls_of(family)


def test_most_families_are_replayed() -> None:
    assert len(ordered_families()) >= len(FAMILIES) - 10


def calls_of(family: str) -> list[int]:
    """Elements of the trained parameters of each module that a forward of the model calls."""
    import torch

    from memcalc.step.causal_lm import build

    calls: list[int] = []

    def register(module: torch.nn.Module) -> None:
        whole = type(module).__name__ in HOOKED_WHOLE
        own = sum(each.numel() for each in module.parameters(recurse=whole) if each.requires_grad)
        module.register_forward_pre_hook(lambda *_: calls.append(own))
        for child in () if whole else module.children():
            register(child)

    model = build(run_of(family, recipe="fp32"), torch.device("cpu")).module
    register(model)
    model(torch.zeros(1, 16, dtype=torch.long))
    return calls
