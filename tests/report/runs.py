"""Small runs written by hand; every number can be checked on paper."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from memcalc.allocator import history
from memcalc.events import Event, EventType, timeline
from memcalc.events.memory_curve import MemoryCurve
from memcalc.ledger.component import Component

MIB = 2**20
LAYERS = 4
WEIGHT, ACTIVATION, LOGITS = 24 * MIB, 32 * MIB, 100 * MIB


def two_steps(layers: int = LAYERS, scale: int = 1) -> list[Event]:
    """A model of `layers` weights with AdamW, trained for two steps. With four layers, in MiB:

    weights 4 x 24 = 96; gradients 96; AdamW 2 x 96 = 192, from the first step on; activations 4 x 32 = 128; logits 100.
    Peak in loss_2: 96 + 192 + 128 + 100 = 516, and 0.03125 of inputs.
    """
    return list(_events(layers, scale))


def _events(layers: int, scale: int) -> Iterator[Event]:
    numbers = count(1)
    mark = Event(EventType.PHASE)
    current = {"phase": ""}

    def phase(name: str) -> Event:
        current["phase"] = name
        return mark._replace(phase=name)

    def alloc(size: int, component: Component | None, module: str, operator: str, line: str) -> Event:
        shape = (size // 2,)
        place = (module, operator, shape, "bf16", f"model.py:{line}")
        return Event(EventType.ALLOC, next(numbers), size * scale, 0, component, current["phase"], *place)

    def free(event: Event) -> Event:
        return Event(EventType.FREE, event.storage)

    yield phase("model")
    for layer in range(layers):
        yield alloc(WEIGHT, Component.WEIGHTS, f"layers.{layer}.mlp", "aten.empty", "10")
    yield phase("optimizer")
    yield phase("input")
    yield alloc(MIB // 32, Component.INPUTS, "", "aten.randint", "90")
    gradients: list[Event] = []
    for step in (1, 2):
        yield phase(f"zero_grad_{step}")
        yield from map(free, gradients)
        yield phase(f"forward_{step}")
        saved = []
        for layer in range(layers):
            saved.append(alloc(ACTIVATION, Component.ACTIVATIONS, f"layers.{layer}.mlp", "aten.mm", "20"))
            yield saved[-1]
            passing = alloc(8 * MIB, Component.TEMPORARIES, f"layers.{layer}.mlp", "aten.gelu", "21")
            yield passing
            yield free(passing)
        yield phase(f"loss_{step}")
        logits = alloc(LOGITS, Component.LOGITS_AND_LOSS, "lm_head", "aten.mm", "30")
        yield logits
        yield phase(f"backward_{step}")
        yield free(logits)
        gradients = []
        for layer in reversed(range(layers)):
            gradients.append(alloc(WEIGHT, Component.GRADIENTS, f"layers.{layer}.mlp", "aten.mm", "20"))
            yield gradients[-1]
            yield free(saved.pop())
        yield phase(f"optimizer_step_{step}")
        if step == 1:
            for layer in range(layers):
                for _moment in range(2):
                    yield alloc(WEIGHT, Component.OPTIMIZER_STATE, f"layers.{layer}.mlp", "aten.zeros_like", "95")
        unknown = alloc(3 * MIB, None, "", "aten.sqrt", "96")
        yield unknown
        yield free(unknown)


def asked_for(events: list[Event]) -> MemoryCurve:
    """Without an allocator."""
    return MemoryCurve(timeline(events))


def replayed(events: list[Event], capacity: int | None = None) -> MemoryCurve:
    """Through PyTorch's allocator."""
    found = history(events, capacity=capacity)
    return MemoryCurve(timeline(events), found.allocated, found.reserved)
