"""Results side by side: estimated, traced, on the null device, measured."""

import io
from collections.abc import Callable
from dataclasses import replace

import pytest

from memcalc.checking.comparison import ComparisonLine, compare, largest_differences, steady_phase
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger, Rows
from memcalc.ledger.result import DeviceMemory, OutsideMemory, Result, Source, known
from memcalc.ledger.row import Row
from memcalc.ledger.row_drafts import phase_names
from memcalc.report.screen import Screen, TextTable
from memcalc.report.tables.comparison import comparison_grids, draw_comparison, source_label

Golden = Callable[[str, str], None]
MIB = 2**20


def memory(reserved: int | None = None, device: int | None = None) -> DeviceMemory:
    return DeviceMemory(reserved, device, OutsideMemory(0, 0, 0))


def held(result: Result, source: Source, device: str | None, *rows: Row, steps: int = 3) -> Result:
    """A result with these rows and no others."""
    ledger = Ledger([Rows(rows)], phase_names(steps))
    headline = replace(result.headline, ledger=ledger, memory=known(memory()))
    return replace(result, source=source, device=device, ranks=(headline,), notes=())


def row(component: Component, size: int, *phases: str) -> Row:
    return Row(component, "x", "x", (), "uint8", 1, size, phases, "", "")


def weights(size: int, steps: int) -> Row:
    return row(Component.WEIGHTS, size, *phase_names(steps))


@pytest.fixture
def estimate(result: Result) -> Result:
    """64 of weights, always; 32 of activations in each loss; 1 of workspace: a peak of 97 MiB in loss_1."""
    saved = row(Component.ACTIVATIONS, 32 * MIB, "loss_1", "loss_2")
    workspace = row(Component.LIBRARY_WORKSPACE, MIB, "loss_1", "loss_2")
    return held(result, "estimate", None, weights(64 * MIB, 2), saved, workspace, steps=2)


@pytest.fixture
def fake(result: Result) -> Result:
    """The same, but 33 of activations, in the third step 34: a peak of 99 MiB in loss_3."""
    saved = [row(Component.ACTIVATIONS, size * MIB, f"loss_{n}") for n, size in enumerate((33, 33, 34), start=1)]
    workspace = row(Component.LIBRARY_WORKSPACE, MIB, "loss_1", "loss_2", "loss_3")
    return held(result, "trace", "fake:cuda", weights(64 * MIB, 3), *saved, workspace)


@pytest.fixture
def null(fake: Result) -> Result:
    """As on fake tensors, and 512 bytes of temporaries in every backward."""
    more = row(Component.TEMPORARIES, 512, "backward_1", "backward_2", "backward_3")
    return held(fake, "trace", "null:h100-80gb", *fake.ledger.rows, more)


def cells(grid: TextTable, name: str) -> tuple[str, ...]:
    (found,) = (line for line in grid.rows if line[0] == name)
    return found


@pytest.mark.parametrize(
    ("long", "short"),
    [("forward_1", "forward_1"), ("zero_grad_2", "zero_grad_2"), ("loss_7", "loss_2"), ("model", "model")],
)
def test_later_steps_are_compared_with_the_steady_one(long: str, short: str) -> None:
    assert steady_phase(long) == short


def test_components_and_phases_of_two_results(estimate: Result, fake: Result) -> None:
    """Differences: the estimate less the trace, as a share of the trace."""
    components, phases, parted = comparison_grids([estimate, fake], "MiB")

    assert components.title == "At the peak: estimate in loss_1, fake in loss_3"
    assert [column.head for column in components.columns] == [
        "component", "estimate MiB", "fake MiB", "difference, bytes", "%",
    ]  # fmt: skip
    assert cells(components, "weights") == ("weights", "64.0", "64.0", "0", "+0.00%")
    assert cells(components, "activations") == ("activations", "32.0", "34.0", f"{-2 * MIB:,}", "-5.88%")
    assert cells(components, "allocated") == ("allocated", "97.0", "99.0", f"{-2 * MIB:,}", "-2.02%")
    assert cells(phases, "loss_2") == ("loss_2", "97.0", "98.0", f"{-MIB:,}", "-1.02%")
    assert cells(phases, "loss_3") == ("loss_3", "97.0", "99.0", f"{-2 * MIB:,}", "-2.02%")  # 97: its steady step
    assert parted.title == "Largest differences of estimate and fake, by component (MiB)"
    assert parted.rows == [("loss_3", "activations", "32.0", "34.0", f"{-2 * MIB:,}", "-5.88%")]  # 1 MiB in loss_1


@pytest.mark.parametrize("width", [80, 120])
def test_three_results(width: int, estimate: Result, fake: Result, null: Result, golden: Golden) -> None:
    file = io.StringIO()
    draw_comparison(Screen(file, width), (estimate, fake, null), "MiB")

    golden(f"comparison_{width}", file.getvalue())
    assert max(len(line) for line in file.getvalue().splitlines()) <= width


def test_differences_of_three_results_have_their_own_table(estimate: Result, fake: Result, null: Result) -> None:
    _, differences, *_ = comparison_grids([estimate, fake, null], "MiB")

    assert [column.head for column in differences.columns] == [
        "component", "estimate - null", "%", "fake - null", "%",
    ]  # fmt: skip
    assert cells(differences, "allocated") == ("allocated", f"{-2 * MIB:,}", "-2.02%", "0", "+0.00%")


def test_each_component_is_listed_with_its_largest_difference(estimate: Result, fake: Result, null: Result) -> None:
    """512 bytes in three backwards; 1, 1 and 2 MiB of activations in three losses."""
    assert largest_differences(compare(fake, null), 0, 1) == [("backward_1", ComparisonLine("temporaries", (0, 512)))]
    assert largest_differences(compare(estimate, null), 0, 1) == [
        ("loss_3", ComparisonLine("activations", (32 * MIB, 34 * MIB))),
        ("backward_1", ComparisonLine("temporaries", (0, 512))),
    ]


def test_results_that_are_alike_part_nowhere(fake: Result) -> None:
    assert len(comparison_grids([fake, fake], "MiB")) == 2


def measured(result: Result, device: str, size: int) -> Result:
    return held(result, "measure", device, row(Component.TEMPORARIES, size, "loss_3"))


def test_a_measurement_is_compared_as_a_trace_is(estimate: Result) -> None:
    """97 MiB were said, in loss_1; 96 of temporaries were held, in loss_3."""
    components, phases, parted = comparison_grids([estimate, measured(estimate, "cuda:0", 96 * MIB)], "bytes")

    assert components.title == "At the peak: estimate in loss_1, measured in loss_3"
    assert cells(components, "temporaries")[1:4] == ("0", f"{96 * MIB:,}", f"{-96 * MIB:,}")
    assert cells(phases, "loss_3") == ("loss_3", f"{97 * MIB:,}", f"{96 * MIB:,}", f"+{MIB:,}", "+1.04%")
    assert parted.title == "Largest differences of estimate and measured, by component (bytes)"


@pytest.mark.parametrize("device", ["cpu", "fake:cpu"])
def test_a_cpu_has_none_of_cudas_workspaces(estimate: Result, device: str) -> None:
    other = measured(estimate, device, 96 * MIB)
    file = io.StringIO()
    draw_comparison(Screen(file, 120), (estimate, other), "bytes")

    assert compare(estimate, other).without_cuda
    assert cells(comparison_grids([estimate, other], "bytes")[1], "loss_3")[3] == "0"
    assert "omits workspaces and block rounding, which exist only on CUDA" in file.getvalue()
    assert not compare(estimate, measured(estimate, "cuda:0", 1)).without_cuda


def test_reserved_and_device_bytes_where_the_reference_has_them(estimate: Result) -> None:
    said = replace(estimate, ranks=(replace(estimate.headline, memory=known(memory(110 * MIB))),))
    got = measured(estimate, "cuda:0", 96 * MIB)
    got = replace(got, ranks=(replace(got.headline, memory=known(memory(100 * MIB, 500 * MIB))),))
    grid, *_ = comparison_grids([said, got], "MiB")

    assert cells(grid, "reserved") == ("reserved", "110.0", "100.0", f"+{10 * MIB:,}", "+10.00%")
    assert cells(grid, "device") == ("device", "-", "500.0", "-", "-")


def test_sources_in_a_word(estimate: Result, fake: Result, null: Result) -> None:
    real = replace(estimate, source="measure", device="cuda:0")

    assert [source_label(one) for one in (estimate, fake, null, real)] == ["estimate", "fake", "null", "measured"]


def test_no_line_is_lost_in_a_comparison(estimate: Result, null: Result) -> None:
    """Components sum to the allocated peaks on both sides."""
    found = compare(estimate, null)

    for at in range(2):
        assert sum(line.sizes[at] or 0 for line in found.components) == found.totals[0].sizes[at]
