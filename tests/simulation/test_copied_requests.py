"""Requests of repeated micro-batches are copies of the first ones: a run without copies has the same."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.simulation.simulated_run import SimulatedRun
from memcalc.stream.requests import Requests, replay

SIZES = ("num_layers=3", "b=2", "s=256", "recipe=pure", "data_parallel=2", "zero_stage=3")
PAIRS = ("pairs=true", "reference_model=true")


class NeverCopied(Requests):
    """Requests that are never copied, because they are of another class."""


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(
    "words",
    [
        (),
        PAIRS,
        (*PAIRS, "gradient_accumulation_steps=4"),
        ("evaluation_batch_size=2", "gradient_accumulation_steps=2"),
        ("empty_cache_steps=2",),
    ],
    ids=["a step", "a reference", "micro-batches with a reference", "an evaluation", "an emptied cache"],
)
def test_copies_are_what_would_be_written(engine: str, words: tuple[str, ...]) -> None:
    """A reference under FSDP keeps its root gathered from the first forward on; each copy gathered another one."""
    spec = memcalc.load("qwen2.5-0.5b", *SIZES, f"engine={engine}", *words)
    copied, again = (replay(SimulatedRun(spec, requests).play()) for requests in (Requests(), NeverCopied()))

    assert copied.reserved_bytes == again.reserved_bytes
    assert copied.tops == again.tops


@pytest.mark.parametrize("accumulates", [1, 3])
def test_an_adapters_gradient_may_exist_after_its_module_has_ended(accumulates: int) -> None:
    """Autocast casts fp32 adapters, and the cast's backward follows that of the module: the unit ends with it."""
    words = ("recipe=amp", "lora.rank=8", "fsdp.wrap=layers-and-trained", f"gradient_accumulation_steps={accumulates}")
    spec = memcalc.load("qwen2.5-0.5b", *SIZES, "engine=fsdp1", *words)
    found = replay(SimulatedRun(spec, Requests()).play())

    assert found.tops["optimizer_step_2"] == found.tops["optimizer_step_1"]
