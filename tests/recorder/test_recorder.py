"""The recorder on small programs: storages, not tensors; who they belong to; what they are for."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

from memcalc.events import Event, EventType, timeline
from memcalc.ledger.component import Component
from memcalc.recorder.kernels import Hidden, Kernels
from memcalc.recorder.ledger import traced_ledger
from memcalc.recorder.recorder import Recorder


def sizes(recorder: Recorder) -> list[int]:
    """Bytes allocated (positive) and freed (negative), in order."""
    gc.collect()
    alive: dict[int, int] = {}
    found = []
    for event in recorder.events():
        if event.kind is EventType.ALLOC:
            alive[event.storage] = event.bytes
            found.append(event.bytes)
        elif event.kind is EventType.FREE:
            found.append(-alive[event.storage])
    return found


def test_views_cost_nothing_and_the_last_owner_frees() -> None:
    """A view keeps its base alive."""
    with Recorder() as recorder:
        x = torch.zeros(4, 8)
        y = x[0].view(2, 4).t()
        del x
        assert sizes(recorder) == [128]
        del y
        assert sizes(recorder) == [128, -128]


def test_resizing_ends_a_life_and_begins_another() -> None:
    """FSDP2 frees with storage.resize_(0), which is no operator."""
    with Recorder() as recorder:
        x = torch.zeros(256)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(512)
    assert sizes(recorder)[:3] == [1024, -1024, 512]


def test_a_tied_weight_counts_once() -> None:
    """Two modules, one storage."""
    with Recorder() as recorder:
        a, b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        b.weight = a.weight
        recorder.mark(Component.WEIGHTS, [a.weight, b.weight])
    weights = [event for event in recorder.events() if event.component is Component.WEIGHTS]
    assert [event.bytes for event in weights] == [256]


class Greedy(Kernels):
    """A device with matmuls that allocate 1000 bytes inside and keep 10."""

    def hidden(self, operator: object, *_: object) -> tuple[Hidden, ...]:
        if operator is not torch.ops.aten.mm.default:
            return ()
        return (Hidden((10,), at=0, component=Component.LIBRARY_WORKSPACE), Hidden((1000, -1000)))


def test_scripts_stand_where_the_kernel_runs_them() -> None:
    """Workspaces are allocated before or after the output, as in the kernel."""
    with Recorder(Greedy()) as recorder:
        x = torch.zeros(4, 4)
        y = x @ x
    assert sizes(recorder)[:4] == [64, 10, 64, 1000]
    del y


def test_backward_belongs_to_the_module_of_its_forward() -> None:
    """Modules have no backward of their own: autograd's numbers tell."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    with Recorder() as recorder:
        recorder.name_modules(model)
        recorder.begin_phase("forward_1")
        y: Tensor = model(torch.zeros(2, 4))
        recorder.end_phase()
        recorder.begin_phase("backward_1")
        y.sum().backward()
        recorder.mark(Component.GRADIENTS, [p.grad for p in model.parameters() if p.grad is not None])
        recorder.end_phase()
    made = {(event.phase, event.operator): event for event in recorder.events() if event.kind is EventType.ALLOC}
    assert made["forward_1", "aten.sigmoid"].module == "1"
    assert made["backward_1", "aten.sigmoid_backward"].module == "1"
    assert made["backward_1", "aten.mm"].module == "0"
    assert made["backward_1", "aten.mm"].component is Component.GRADIENTS
    assert "test_recorder.py" in made["forward_1", "aten.sigmoid"].line


def test_the_ledger_sums_to_the_peak_of_each_phase() -> None:
    """Two phases; what the allocator adds is a row of its own."""
    events = (
        Event(EventType.PHASE, phase="model"),
        Event(
            EventType.ALLOC,
            0,
            100,
            component=Component.WEIGHTS,
            phase="model",
            module="layers.0",
            shape=(25,),
            dtype="fp32",
        ),
        Event(
            EventType.ALLOC,
            1,
            100,
            component=Component.WEIGHTS,
            phase="model",
            module="layers.1",
            shape=(25,),
            dtype="fp32",
        ),
        Event(EventType.PHASE, phase="forward_1"),
        Event(EventType.ALLOC, 2, 40, component=Component.TEMPORARIES, phase="forward_1", operator="aten.mm"),
        Event(EventType.FREE, 2),
    )
    ledger = traced_ledger(timeline(events), [0, 512, 1024, 1024, 1536, 1024])

    assert ledger.totals == {"model": 1024, "forward_1": 1536}
    assert ledger.components("forward_1") == {
        Component.WEIGHTS: 200,
        Component.TEMPORARIES: 40,
        Component.BLOCK_ROUNDING: 1296,
    }
    weights = next(row for row in ledger.rows if row.component is Component.WEIGHTS)
    assert (weights.module, weights.count, weights.formula) == ("layers.*", 2, "4·25")


def test_autocasts_copies_of_weights_are_temporaries() -> None:
    """They outlive forward, as the cast of the input does, which is an activation."""
    with Recorder() as recorder:
        layer, x = nn.Linear(8, 16, bias=False), torch.zeros(4, 8)
        recorder.mark(Component.WEIGHTS, layer.parameters())
        recorder.begin_phase("forward_1")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
            recorder.end_phase()
        recorder.begin_phase("backward_1")
        del y
    casts = {e.bytes: e.component for e in recorder.events() if e.operator == "aten._to_copy"}
    assert casts == {2 * 8 * 16: Component.TEMPORARIES, 2 * 4 * 8: Component.ACTIVATIONS}
