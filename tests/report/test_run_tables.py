"""The tables of a run: its notebook, its largest tensors, its reserved memory."""

import io
from collections.abc import Callable

import pytest

from memcalc.allocator import history, replay
from memcalc.allocator.fragmentation import pool_uses
from memcalc.events import Event, EventType, timeline
from memcalc.events.memory_curve import MemoryCurve
from memcalc.ledger.component import Component
from memcalc.report.screen import Screen
from memcalc.report.tables.fragmentation import fragmentation_grids
from memcalc.report.tables.phase_log import phase_log_table
from memcalc.report.tables.recorded_run import RecordedRun, draw_run, run_grids, tensor_grid
from tests.report.runs import MIB, asked_for, two_steps

Golden = Callable[[str, str], None]


@pytest.mark.parametrize("width", [80, 120])
def test_tables(width: int, golden: Golden) -> None:
    file = io.StringIO()
    draw_run(Screen(file, width), RecordedRun(timeline(two_steps()), history(two_steps())), "MiB")

    golden(f"run_{width}", file.getvalue())
    assert max(len(line) for line in file.getvalue().splitlines()) <= width


def test_a_device_without_an_allocator_has_no_reserved_memory() -> None:
    titles = [grid.title for grid in run_grids(RecordedRun(timeline(two_steps())), "MiB")]

    assert titles == ["Phase log: requested, MiB", "Largest at the peak, in loss_2"]


def test_what_each_phase_left() -> None:
    """MiB. Weights 96; activations 128 and 8 of temporaries on top; logits 100; 96 of gradients for the activations;
    two moments of 96, and 3 of a root; then the gradients go."""
    rows = phase_log_table(asked_for(two_steps()), "MiB").rows

    assert [row[:4] for row in rows[:10]] == [
        ("baseline", "0.0", "0.0", "0.0"),
        ("model", "96.0", "+96.0", "96.0"),
        ("optimizer", "96.0", "0.0", "96.0"),
        ("input", "96.0", "+0.0", "96.0"),
        ("zero_grad_1", "96.0", "0.0", "96.0"),
        ("forward_1", "224.0", "+128.0", "232.0"),
        ("loss_1", "324.0", "+100.0", "324.0"),
        ("backward_1", "192.0", "-132.0", "324.0"),
        ("optimizer_step_1", "384.0", "+192.0", "387.0"),
        ("zero_grad_2", "288.0", "-96.0", "384.0"),
    ]
    assert [row[0] for row in rows if row[4]] == ["loss_2"]


def test_micro_batches_that_are_alike_are_one_line() -> None:
    """Gradients of 10 come to life in the first backward and stay: from the second micro-batch on nothing changes."""
    events, number = [Event(EventType.ALLOC, 0, 100)], 1
    for batch in range(4):
        events += [Event(EventType.PHASE, phase="forward_1"), Event(EventType.ALLOC, number, 50)]
        events += [Event(EventType.PHASE, phase="backward_1"), Event(EventType.FREE, number)]
        if batch == 0:
            events.append(Event(EventType.ALLOC, 99, 10))
        number += 1
    rows = phase_log_table(asked_for(events), "bytes").rows

    assert [row[:4] for row in rows] == [
        ("baseline", "100", "+100", "100"),
        ("forward_1", "150", "+50", "150"),
        ("backward_1", "110", "-40", "150"),
        ("forward_1, 2 to 4", "160", "+50", "160"),
        ("backward_1, 2 to 4", "110", "-50", "160"),
    ]


def test_a_turn_that_differs_stands_alone() -> None:
    """Of three turns only the second allocates: the third is like the first, but not next to it."""
    phase = Event(EventType.PHASE, phase="forward_1")
    events = [phase, Event(EventType.ALLOC, 1, 8), Event(EventType.FREE, 1), phase, phase]

    assert [row[0] for row in phase_log_table(asked_for(events), "bytes").rows] == [
        "baseline",
        "forward_1",
        "forward_1, 2 to 3",
    ]
    events = [phase, phase, Event(EventType.ALLOC, 1, 8), Event(EventType.FREE, 1), phase]
    assert [row[0] for row in phase_log_table(asked_for(events), "bytes").rows] == [
        "baseline",
        "forward_1",
        "forward_1, 2",
        "forward_1, 3",
    ]


def test_the_largest_tensors_with_the_lines_that_made_them() -> None:
    """In loss_2: 8 moments of 24 = 192 MiB, 4 x 32 activations, logits of 100, 4 x 24 weights, inputs of 32 KiB."""
    grid = tensor_grid(asked_for(two_steps()), "MiB", 3)

    assert grid.title == "Largest at the peak, in loss_2"
    assert grid.rows == [
        ("O", "192.0", "37.2%", "8", "bf16[12582912]", "layers.*.mlp", "zeros_like model.py:95"),
        ("A", "128.0", "24.8%", "4", "bf16[16777216]", "layers.*.mlp", "mm model.py:20"),
        ("L", "100.0", "19.4%", "1", "bf16[52428800]", "lm_head", "mm model.py:30"),
        ("", "96.0", "18.6%", "5", "smaller ones", "", ""),
        ("", "516.0", "", "18", "requested, total", "", ""),
    ]


def test_what_is_not_known_is_a_dash() -> None:
    (row, _) = tensor_grid(asked_for([Event(EventType.ALLOC, 1, 100)]), "bytes").rows

    assert row == ("?", "100", "100.0%", "1", "-", "-", "-")


def test_no_allocations() -> None:
    assert tensor_grid(MemoryCurve(timeline([])), "MiB").rows == [("", "0.0", "", "0", "requested, total", "", "")]


def test_the_parts_of_reserved_memory_sum_up() -> None:
    """30 of 30 in use; 5.25 of 20 in use; 512 bytes of a small segment of 2: reserved 52, of it 35.25 MiB asked for."""
    events = [
        Event(EventType.ALLOC, 1, 30 * MIB),
        Event(EventType.ALLOC, 2, 5 * MIB + MIB // 4),
        Event(EventType.ALLOC, 3, 100),
    ]
    (grid,) = fragmentation_grids(pool_uses(replay(events).segments), "bytes")
    figures = {row[0]: row[1:4] for row in grid.rows}
    large, split = 35 * MIB + MIB // 4, 20 * MIB - 5 * MIB - MIB // 4

    assert grid.title.startswith("Reserved memory at the peak, bytes: 17,563,136 bytes (32.2%) not allocated")
    assert 52 * MIB - large - 512 == 17_563_136
    assert figures == {
        "requested": ("100", f"{large:,}", f"{large + 100:,}"),
        "rounding": ("412", "0", "412"),
        "waiting": ("0", "0", "0"),
        "split": (f"{2 * MIB - 512:,}", f"{split:,}", f"{2 * MIB - 512 + split:,}"),
        "releasable": ("0", "0", "0"),
        "reserved": (f"{2 * MIB:,}", f"{50 * MIB:,}", f"{52 * MIB:,}"),
        "largest free": (f"{2 * MIB - 512:,}", f"{split:,}", f"{split:,}"),
    }


def test_streams_have_a_table_of_their_own() -> None:
    events = [Event(EventType.ALLOC, 1, 30 * MIB), Event(EventType.ALLOC, 2, 12 * MIB, 7), Event(EventType.FREE, 2)]
    _, streams = fragmentation_grids(pool_uses(replay(events).segments), "MiB")

    assert streams.rows == [
        ("large, stream 0", "1", "30.0", "30.0", "0.0", "0.0"),
        ("large, stream 7", "1", "12.0", "0.0", "0.0", "12.0"),
    ]


def test_nothing_reserved_has_no_table() -> None:
    assert fragmentation_grids([], "MiB") == []


def test_components_without_a_line_of_code() -> None:
    events = [Event(EventType.ALLOC, 1, 100, component=Component.LIBRARY_WORKSPACE, operator="cuBLAS")]

    assert tensor_grid(asked_for(events), "bytes").rows[0] == ("K", "100", "100.0%", "1", "-", "-", "cuBLAS")
