"""Allocations that are identical."""

import pytest

from memcalc.events import Event, EventType
from memcalc.events.timeline import AllocationGroup, groups, module_pattern
from memcalc.ledger.component import Component

ACTIVATIONS = Component.ACTIVATIONS


def tensor(size: int, module: str, line: str = "model.py:12") -> Event:
    return Event(EventType.ALLOC, 1, size, 0, ACTIVATIONS, "forward_1", module, "aten.mm", (size // 2,), "bf16", line)


@pytest.mark.parametrize(
    ("module", "pattern"),
    [
        ("layers.3.mlp", "layers.*.mlp"),
        ("h.11", "h.*"),
        ("layers.0.mlp.experts.63.w1", "layers.*.mlp.experts.*.w1"),
        ("0.weight", "*.weight"),
        ("conv2d.norm1", "conv2d.norm1"),
        ("", ""),
    ],
)
def test_numbers_in_paths_are_stars(module: str, pattern: str) -> None:
    assert module_pattern(module) == pattern


def test_layers_that_are_alike_are_one_line() -> None:
    """3 x 40 = 120 exceeds 100; another size, another line of code and another module stay apart."""
    events = [
        tensor(100, "lm_head"),
        tensor(40, "layers.0.mlp"),
        tensor(40, "layers.1.mlp"),
        tensor(40, "layers.2.mlp"),
        tensor(42, "layers.3.mlp"),
        tensor(40, "layers.1.mlp", "model.py:13"),
    ]

    assert groups(events) == [
        AllocationGroup(ACTIVATIONS, "layers.*.mlp", "aten.mm", (20,), "bf16", "model.py:12", 3, 120),
        AllocationGroup(ACTIVATIONS, "lm_head", "aten.mm", (50,), "bf16", "model.py:12", 1, 100),
        AllocationGroup(ACTIVATIONS, "layers.3.mlp", "aten.mm", (21,), "bf16", "model.py:12", 1, 42),
        AllocationGroup(ACTIVATIONS, "layers.1.mlp", "aten.mm", (20,), "bf16", "model.py:13", 1, 40),
    ]


def test_several_in_one_module_keep_its_name() -> None:
    assert groups([tensor(40, "layers.1.mlp")] * 2)[0].module == "layers.1.mlp"


def test_nothing_makes_no_groups() -> None:
    assert groups([]) == []
