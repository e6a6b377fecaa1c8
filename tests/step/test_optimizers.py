"""The optimizers that really run: they hold the states that the estimate says, and say clearly what is missing."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

import memcalc
from memcalc.errors import Unavailable
from memcalc.ledger.component import Component
from memcalc.spec.optimizers import OPTIMIZERS
from memcalc.step.optimizers import state_tensors
from tests.step.test_recipes import TINY, Watcher, watched

LIBRARIES = {
    "adam-8bit": "bitsandbytes",
    "lion-8bit": "bitsandbytes",
    "lamb": "bitsandbytes",
    "adam-4bit": "torchao",
    "galore": "galore_torch",
    "adafactor-hf": "transformers",
}
OWN = [name for name in OPTIMIZERS if name not in LIBRARIES]


def held(watcher: Watcher, phase: str, component: Component) -> int:
    return watcher.ends[phase].get(component, 0)


def states(**training: Any) -> int:
    """Bytes of what a run on the CPU keeps, but for single numbers: torch has most of these on the host."""
    optimizer = watched(**training).run.optimizer
    assert optimizer is not None
    return sum(tensor.nbytes for tensor in state_tensors(optimizer) if tensor.numel() > 1)


def estimated(phase: str, component: Component, **training: Any) -> int:
    """The same of the estimate."""
    config = {"model": TINY, "training": {"sequence_length": 16, "dropout": 0.0} | training}
    rows = memcalc.estimate(config).ledger.rows
    return sum(row.bytes for row in rows if phase in row.phases and row.component is component and row.shape != (1,))


@pytest.mark.parametrize("how", ["foreach", "for-loop"])
@pytest.mark.parametrize("name", OWN)
def test_states_are_those_of_the_estimate(name: str, how: str) -> None:
    training = {"recipe": "pure", "optimizer": name, "optimizer_implementation": how}

    assert states(**training) == estimated("zero_grad_2", Component.OPTIMIZER_STATE, **training)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw", {"amsgrad": True}),
        ("rmsprop", {"centered": True}),
        ("rmsprop", {"momentum": 0.9}),
        ("momentum", {"nesterov": True}),
    ],
)
def test_options_reach_the_optimizer(name: str, options: dict[str, Any]) -> None:
    training = {"recipe": "pure", "optimizer": name, "optimizer_options": options}

    assert states(**training) == estimated("zero_grad_2", Component.OPTIMIZER_STATE, **training)


@pytest.mark.parametrize(("kind", "each"), [("weights", 2), ("fp32", 4)])
def test_an_average_is_one_more_copy(kind: str, each: int) -> None:
    """In the weights' two bytes, or in four."""
    training = {"recipe": "pure", "optimizer": "sgd"}
    counter = 8 if kind == "weights" else 0  # n_averaged, which AveragedModel has on the host
    copy = held(watched(**training, ema=kind), "optimizer", Component.OPTIMIZER_STATE) - counter

    assert copy == estimated("optimizer", Component.OPTIMIZER_STATE, **training, ema=kind)
    assert copy == each * held(watched(**training), "optimizer", Component.WEIGHTS) // 2


def test_main_gradients_can_be_in_16_bit() -> None:
    """mixed-18 sums in fp32, 4 bytes beside the weights' 2; --grad-reduce-in-bf16 in 2."""
    usual = watched(recipe="mixed-18")
    short = watched(recipe="mixed-18", gradient_dtype="bf16")

    assert held(usual, "zero_grad_2", Component.GRADIENTS) == 2 * held(short, "zero_grad_2", Component.GRADIENTS)


def test_clipping_holds_the_norm_to_its_bound() -> None:
    """SGD without momentum moves the weights by the learning rate times the clipped gradient."""
    watcher = watched(recipe="fp32", dtype="fp32", optimizer="sgd", gradient_clipping=1e-3)
    assert watcher.run.copies is not None
    squares = sum(float(gradient.square().sum()) for gradient in watcher.run.copies.gradients)

    assert squares**0.5 == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("name", list(LIBRARIES))
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = LIBRARIES[name]
    monkeypatch.setattr("importlib.util.find_spec", lambda found: None if found == package else find_spec(found))

    with pytest.raises(Unavailable, match=f"pip install {package.replace('_', '-')}"):
        watched(recipe="pure", optimizer=name)


def test_a_missing_package_of_a_paged_optimizer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(Unavailable, match="paged adamw runs PagedAdamW32bit of bitsandbytes: pip install bitsandbytes"):
        watched(recipe="pure", optimizer_options={"paged": True})
