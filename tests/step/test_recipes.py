"""Recipes hold the copies that the table names, when it names them; optimizers hold their states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from memcalc.errors import InputError, Unavailable
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import phase_names
from memcalc.spec.loading import load
from memcalc.step.causal_lm import build
from memcalc.step.loop import TrainingRun

TINY = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 16}


class Watcher:
    """Recorder of the live bytes at the end of each phase."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self.names: list[str] = []
        self.ends: dict[str, dict[Component, int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield
        self.names.append(name)
        self.ends[name] = {
            component: sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
            for component, tensors in self.run.tensors_by_component().items()
        }


def watched(**training: Any) -> Watcher:
    given = load({"model": TINY, "training": {"sequence_length": 16, "dropout": 0.0} | training})
    run = TrainingRun(given, torch.device("cpu"))
    watcher = Watcher(run)
    run.execute(2, watcher)
    return watcher


def parameters(watcher: Watcher) -> int:
    assert watcher.run.model is not None
    return sum(p.numel() for p in watcher.run.model.module.parameters())


def bytes_each(watcher: Watcher, phase: str, component: Component) -> float:
    return watcher.ends[phase].get(component, 0) / parameters(watcher)


def test_phases_come_in_their_order() -> None:
    assert tuple(watched().names) == phase_names(2)


class Held(NamedTuple):
    """Bytes a parameter: gradients before backward, after it and after zero_grad; Adam's moments."""

    weights: int
    masters: int
    before: int
    after: int
    zeroed: int
    moments: int


@pytest.mark.parametrize(
    ("recipe", "dtype", "held"),
    [
        ("fp32", "fp32", Held(4, 0, 0, 4, 0, 8)),
        ("amp", "bf16", Held(4, 0, 0, 4, 0, 8)),
        ("pure", "bf16", Held(2, 0, 0, 2, 0, 4)),
        ("mixed-16", "bf16", Held(2, 4, 0, 2, 0, 8)),
        ("mixed-18", "bf16", Held(2, 4, 4, 4, 4, 8)),
        ("mixed-20", "bf16", Held(2, 4, 0, 6, 0, 8)),
    ],
)
def test_copies_live_when_the_table_says(recipe: str, dtype: str, held: Held) -> None:
    run = watched(recipe=recipe, dtype=dtype)

    assert bytes_each(run, "backward_1", Component.WEIGHTS) == held.weights
    assert bytes_each(run, "optimizer", Component.MASTER_WEIGHTS) == held.masters
    assert bytes_each(run, "forward_1", Component.GRADIENTS) == held.before
    assert bytes_each(run, "backward_1", Component.GRADIENTS) == held.after
    assert bytes_each(run, "optimizer_step_1", Component.GRADIENTS) == held.after
    assert bytes_each(run, "zero_grad_2", Component.GRADIENTS) == held.zeroed
    assert bytes_each(run, "backward_1", Component.OPTIMIZER_STATE) == 0
    # Adam counts each tensor's steps in 4 bytes; here these are on the device.
    assert bytes_each(run, "optimizer_step_1", Component.OPTIMIZER_STATE) == pytest.approx(held.moments, rel=0.01)


@pytest.mark.parametrize(("recipe", "kept"), [("pure", 2), ("mixed-16", 2), ("mixed-20", 6)])
def test_zeroed_gradients_stay(recipe: str, kept: int) -> None:
    assert bytes_each(watched(recipe=recipe, zero_grad="zero"), "forward_2", Component.GRADIENTS) == kept


@pytest.mark.parametrize(
    ("optimizer", "implementation", "states"),
    [
        ("sgd", "foreach", 0),
        ("momentum", "fused", 4),
        ("momentum", "for-loop", 4),
        ("adam", "for-loop", 8),
        ("adamw", "fused", 8),
        ("lion", "foreach", 4),
        ("lion", "for-loop", 4),
    ],
)
def test_optimizers_hold_their_states(optimizer: str, implementation: str, states: int) -> None:
    run = watched(recipe="mixed-16", optimizer=optimizer, optimizer_implementation=implementation)

    assert bytes_each(run, "optimizer_step_1", Component.OPTIMIZER_STATE) == pytest.approx(states, rel=0.01)


def test_adafactor_holds_a_row_and_a_column() -> None:
    run = watched(recipe="mixed-16", optimizer="adafactor")

    assert 0 < bytes_each(run, "optimizer_step_1", Component.OPTIMIZER_STATE) < 1


@pytest.mark.parametrize("recipe", ["mixed-16", "mixed-18", "mixed-20"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw", "lion", "adafactor"])
def test_masters_move_and_weights_follow(recipe: str, optimizer: str) -> None:
    run = watched(recipe=recipe, optimizer=optimizer).run
    assert run.copies is not None
    torch.manual_seed(0)
    start = build(run.spec, run.device).module.parameters()

    for before, weight, master in zip(start, run.copies.parameters, run.copies.masters, strict=True):
        assert not torch.equal(before.float(), master)
        assert torch.equal(weight, master.to(weight.dtype))


@pytest.mark.parametrize("recipe", ["mixed-18", "mixed-20"])
def test_two_micro_batches_sum_to_one_large_one(recipe: str) -> None:
    """The fp32 gradients of a repeated micro-batch are those of the micro-batch itself: two halves."""
    once, twice = (watched(recipe=recipe, gradient_accumulation_steps=n).run.copies for n in (1, 2))
    assert once is not None
    assert twice is not None

    for one, two in zip(once.masters, twice.masters, strict=True):
        assert two.grad is not None
        assert two.grad.dtype == torch.float32
        torch.testing.assert_close(one.grad, two.grad, rtol=0.02, atol=1e-4)


def test_micro_batches_share_the_names_of_their_phases() -> None:
    assert watched(gradient_accumulation_steps=2).names.count("backward_1") == 2


def test_fused_lion_is_refused() -> None:
    with pytest.raises(InputError, match="no fused implementation"):
        watched(optimizer="lion", optimizer_implementation="fused")


def test_eight_bit_adam_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(Unavailable, match="pip install bitsandbytes"):
        watched(optimizer="adam-8bit")


def test_sharded_specs_are_refused() -> None:
    given = load("gpt2", ["tensor_parallel=2"])

    with pytest.raises(InputError, match="tensor_parallel = 2, but the step runs on one device"):
        TrainingRun(given, torch.device("cpu"))
