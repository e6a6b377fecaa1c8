"""The verdict of a compiled run: eager execution is counted, and recorded compiled runs widen its interval."""

import re
from typing import Any

import pytest

import memcalc
from memcalc.estimation.outside_allocator import outside_bytes
from memcalc.layout.stages import stages_of
from memcalc.report.screens.verdict import verdict
from memcalc.spec.hardware.gpus import find_gpu
from memcalc.states.model_states import state_peak
from memcalc.sweeping.verdict_terms import DOES_NOT_FIT
from memcalc.verdict import recorded_errors
from memcalc.verdict.judge import judge
from memcalc.verdict.needs import least_bytes
from memcalc.verdict.recorded_errors import compiled_errors, replay_errors, reserve_ratio
from memcalc.verdict.run_types import COMPILED, kinds_of
from tests.records import RECORDS
from tools.recorded_errors import compared, compiled_runs

GIB = 2**30
PLAIN = "one GPU, plain modules"


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled runs reserve 40 % less to 1 % more than eager execution."""
    compiled: dict[str, Any] = {"runs": 40, "median": 0.2, "worst": -0.45, "low": -0.4, "high": 0.01}
    table = {**RECORDS, "compiled": compiled}
    monkeypatch.setattr(recorded_errors, "_table", lambda: table)


@pytest.mark.usefixtures("records")
def test_the_interval_holds_both_errors() -> None:
    """The replay is off by -0.1 % to 0.2 %: 0.999 * 0.6 = 0.5994, and 1.002 * 1.01 = 1.01202."""
    found = replay_errors((PLAIN,), compiled=True)

    assert (found.low, found.high) == pytest.approx((0.5994 - 1, 1.01202 - 1))
    assert (found.run_type, found.runs, found.median, found.worst) == (COMPILED, 40, 0.2, -0.45)
    assert replay_errors((PLAIN,)).run_type == PLAIN


@pytest.mark.usefixtures("records")
def test_the_interval_of_a_ratio_holds_both_errors() -> None:
    """Ratios of 1.05 to 1.2 around 1.1: 1.05 / 1.1 * 0.6 = 0.5727, and 1.2 / 1.1 * 1.01 = 1.1018."""
    ratio, found = reserve_ratio(("DDP",), compiled=True)

    assert ratio == 1.1
    assert (1 + found.low, 1 + found.high) == pytest.approx((0.572727, 1.101818), abs=1e-6)
    assert not found.replayed


@pytest.mark.usefixtures("records")
@pytest.mark.parametrize(
    ("gpu", "eager", "compiled"),
    [
        ("h200", "fits", "fits"),
        ("h100-80gb", "does-not-fit", "unknown"),  # 109 GiB eager: 65 to 110 GiB
        ("rtx-4090", "does-not-fit", "does-not-fit"),  # the states alone are 60 GiB
    ],
)
def test_verdicts(gpu: str, eager: str, compiled: str) -> None:
    words = ("recipe=pure", "b=4")
    found = judge(memcalc.load("llama-3-8b", *words, "compile=true", gpu=gpu))

    assert judge(memcalc.load("llama-3-8b", *words, gpu=gpu)).answer == eager
    assert found.answer == compiled


@pytest.mark.parametrize("name", ["compile", "training.compile", "torch_compile"])
def test_names(name: str) -> None:
    assert memcalc.load("gpt2", f"{name}=true").training.compile


def test_only_states_are_a_lower_bound() -> None:
    """A compiler fuses operators, so that activations may be fewer; weights, gradients and optimizer state stay."""
    spec = memcalc.load("llama-3-8b", "recipe=pure", "b=4", "compile=true", gpu="h100-80gb")
    gpu = find_gpu("h100-80gb")
    states = state_peak(spec, stages_of(spec)[0])

    assert least_bytes(spec, gpu) == states + outside_bytes(spec, gpu)
    assert states >= 4 * 2 * memcalc.estimate(spec).parameters  # bf16 weights, gradients and two moments


@pytest.mark.usefixtures("records")
def test_a_sweep_says_does_not_fit_only_of_states() -> None:
    table = memcalc.sweep("llama-3-8b", {"b": [3, 4]}, "recipe=pure", "compile=true", gpu="h100-80gb")

    eager = memcalc.sweep("llama-3-8b", {"b": [3, 4]}, "recipe=pure", gpu="h100-80gb")

    assert DOES_NOT_FIT not in table.verdict.tolist()
    assert eager.verdict.tolist() == [DOES_NOT_FIT, DOES_NOT_FIT]


def test_the_screen_and_the_list_of_limits() -> None:
    """The headline says that its figure is that of eager execution."""
    result = memcalc.estimate("gpt2", "compile=true", gpu="h100-80gb")
    on_any = memcalc.estimate("gpt2", "compile=true")

    assert re.search(r"^FITS: needs [\d.]+ GiB in eager execution of 79\.10 GiB", verdict(result, "GiB"))
    assert verdict(on_any, "GiB").endswith("reserved in eager execution. Add --gpu to check whether it fits.")
    assert "eager" not in verdict(memcalc.estimate("gpt2", gpu="h100-80gb"), "GiB")

    assert any("torch.compile" in line and "eager" in line for line in result.not_modelled)
    assert kinds_of(result.spec) == (PLAIN, "one GPU")
    assert not any("torch.compile" in limit.feature for limit in result.limits if limit.holds_memory)


def test_every_seventh_recorded_compiled_run_is_inside() -> None:
    runs = list(compiled_runs())
    errors = compiled_errors()

    assert len(runs) >= 40
    assert errors.runs == len(runs)
    for run in runs[::7]:
        assert errors.low <= compared(run).error <= errors.high, run.name
