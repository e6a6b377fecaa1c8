"""Fake tensors with the CPU's semantics against the CPU itself: the same events, byte for byte, in the same order."""

from __future__ import annotations

from itertools import groupby, product
from typing import Any

import pytest

import memcalc
from memcalc.events import Event, EventType
from memcalc.recorder.observer import RecordingObserver
from memcalc.step.loop import TrainingRun
from memcalc.tracing.session import fake_cpu, real_cpu

SMALL = ("b=1", "s=16", "l=2", "V=97")
GPT = ("gpt2", "d=64", "h=4", *SMALL)
LLAMA = (
    "llama-3.2-1b",
    "d=64",
    "h=4",
    "model.num_key_value_heads=2",
    "model.head_dim=16",
    "model.intermediate_size=96",
    *SMALL,
)


def events(session: Any, source: str, *overrides: str) -> list[Event]:
    """The events of two steps, without the times at which they happened."""
    with session() as device:
        run = TrainingRun(memcalc.load(source, *overrides), device.device)
        run.execute(2, RecordingObserver(run, device.recorder))
        return in_order([event._replace(time_us=None) for event in device.recorder.events()])


def in_order(recorded: list[Event]) -> list[Event]:
    """Frees that follow each other, sorted: PyTorch empties autocast's cache in the order of addresses."""
    found: list[Event] = []
    for frees, alike in groupby(recorded, lambda event: event.kind is EventType.FREE):
        run = list(alike)
        found += sorted(run, key=lambda event: event.storage) if frees else run
    return found


SETTINGS = [
    ("recipe=pure", "training.attention=eager", "training.dropout=0.1"),
    ("recipe=mixed-18", "training.recompute=selective", "training.attention=eager"),
    ("recipe=amp", "training.gradient_accumulation_steps=3"),
    ("recipe=pure", "training.optimizer=adafactor", "training.optimizer_implementation=for-loop"),
]
LONG_SETTINGS = [
    ("recipe=pure", "training.attention=eager", "training.recompute=full"),
    ("recipe=mixed-20", "training.optimizer=sgd", "training.zero_grad=zero"),
    ("recipe=fp32", "training.dtype=fp32", "training.optimizer=momentum"),
]


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        *(  # quick: each setting on one of the models in turn
            pytest.param(model, settings, marks=() if at % 2 == turn else pytest.mark.long)
            for at, settings in enumerate(SETTINGS)
            for turn, model in enumerate((GPT, LLAMA))
        ),
        *(pytest.param(*each, marks=pytest.mark.long) for each in product((GPT, LLAMA), LONG_SETTINGS)),
    ],
    ids=lambda words: " ".join(words[-3:]),
)
def test_fake_and_real_cpu_record_the_same_events(model: tuple[str, ...], settings: tuple[str, ...]) -> None:
    """Two steps: operators, bytes, order, modules, lines, components."""
    real = events(real_cpu, *model, *settings)

    assert events(fake_cpu, *model, *settings) == real
    assert len(real) > 500
