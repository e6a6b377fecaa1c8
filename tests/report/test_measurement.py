"""What was measured beside what was estimated."""

from dataclasses import replace

import pytest

from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger, Rows
from memcalc.ledger.result import Result
from memcalc.ledger.row import Row
from memcalc.report.measurement import measurement_grid, steady_phase


@pytest.mark.parametrize(
    ("measured", "estimated"),
    [("forward_1", "forward_1"), ("zero_grad_2", "zero_grad_2"), ("loss_7", "loss_2"), ("model", "model")],
)
def test_later_steps_are_compared_with_the_steady_one(measured: str, estimated: str) -> None:
    assert steady_phase(measured) == estimated


def measured_as(result: Result, device: str) -> Result:
    """A measurement of one phase: 100 bytes more than estimated, where 50 bytes of CUDA's were estimated."""
    size = result.ledger.totals["backward_2"]
    row = Row(Component.TEMPORARIES, "x", "x", (), "uint8", 1, size + 100, ("backward_3",), "measured", "")
    headline = replace(result.headline, ledger=Ledger([Rows([row])], ("backward_3",)))
    return replace(result, source="measure", device=device, ranks=(headline,))


def test_each_phase_has_its_difference(result: Result) -> None:
    grid = measurement_grid(result, measured_as(result, "cuda:0"), "bytes")
    size = result.ledger.totals["backward_2"]

    assert grid.rows[0] == ("backward_3", f"{size:,}", f"{size + 100:,}", "-100", "-0.00%")
    assert grid.rows[1][0] == "allocated peak"


def test_a_cpu_has_none_of_cudas_workspaces(result: Result) -> None:
    workspace = Row(Component.LIBRARY_WORKSPACE, "cuBLAS", "x", (), "uint8", 1, 50, result.ledger.phases, "", "")
    ledger = Ledger([Rows([*result.ledger.rows, workspace])], result.ledger.phases)
    estimate = replace(result, ranks=(replace(result.headline, ledger=ledger),))

    assert measurement_grid(estimate, measured_as(result, "cpu"), "bytes").rows[0][3] == "-100"
    assert measurement_grid(estimate, measured_as(result, "cuda:0"), "bytes").rows[0][3] == "-50"
