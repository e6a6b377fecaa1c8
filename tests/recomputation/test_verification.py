"""Planned peaks compared with traced ones: torch.utils.checkpoint runs the plan on simulated devices."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import memcalc
from memcalc import api
from memcalc.errors import InputError, Unavailable
from tests.cli.conftest import Run, run  # noqa: F401 -- a fixture
from tests.nullcuda.conftest import NULL_PYTHON

SMALL = ("recipe=pure", "b=16", "l=4", "s=256", "V=2000")

needs_null = pytest.mark.skipif(not NULL_PYTHON.exists(), reason="no CUDA build of torch: `make .venv-null`")


@pytest.mark.long
@needs_null
@pytest.mark.parametrize(
    ("config", "overrides", "budgets"),
    [
        ("gpt2", ("recipe=pure", "b=16", "s=1024"), ("17GiB", "16GiB", "15.5GiB")),
        ("gpt2", ("recipe=amp", "b=8", "s=1024"), ("10GiB", "9GiB")),
        (
            "llama-3.2-1b",
            ("recipe=pure", "b=4", "s=2048", "optimizer_implementation=fused"),
            ("30GiB", "28GiB", "26GiB"),
        ),
        ("llama-3.2-1b", ("recipe=mixed-18", "b=4", "s=1024", "implementation=huggingface"), ("34GiB",)),
        ("llama-3.2-1b", ("recipe=amp", "b=4", "s=2048", "optimizer_implementation=fused"), ("36GiB",)),
        ("codegen-350m", ("recipe=pure", "b=8", "s=1024", "attention=flash"), ("11.5GiB", "10.5GiB", "10GiB")),
        ("codegen-350m", ("recipe=amp", "b=8", "s=1024"), ("14.5GiB",)),
    ],
)
def test_planned_peaks_are_traced_peaks(
    config: str, overrides: tuple[str, ...], budgets: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The bars: allocated within 0.1 %, and what is reserved fits the budget."""
    pytest.importorskip("torch")
    for budget in budgets:
        planning = memcalc.recompute(config, *overrides, gpu="a100-80gb", budget=budget)
        assert planning.recompute != "none"
        for device in api.verified(planning, python=str(NULL_PYTHON)):
            with capsys.disabled():
                print(
                    f"\n{config} {budget} on {device.device}: planned {device.planned:,}, traced {device.traced:,}, "
                    f"{device.planned / device.traced - 1:+.4%}, budget {planning.budget:,}: {planning.recompute}"
                )
            assert abs(device.planned / device.traced - 1) <= 0.001
            outside = planning.result.headline.outside
            assert device.reserved[1] + outside.device_context <= planning.limit


def test_a_device_that_is_asked_for_alone_must_be_there() -> None:
    planning = memcalc.recompute("gpt2", *SMALL, gpu="a100-40gb", budget="2.3GiB")

    with pytest.raises(Unavailable):
        api.verified(planning, ("null",), python="/nowhere/python")
    with pytest.raises(InputError, match=r"device = 'real' is not known to --verify\. Name fake or null\."):
        api.verified(planning, ("real",))


def test_the_command_verifies(run: Callable[..., Run], tmp_path: Path) -> None:  # noqa: F811
    """On fake tensors the command verifies the plan; without the null device it prints the reason."""
    pytest.importorskip("torch")
    sets = [word for override in SMALL for word in ("--set", override)]
    asked = ("recompute", "gpt2", *sets, "--gpu", "a100-40gb", "--budget", "2.3GiB", "--verify")
    code, out, err = run(*asked, "--python", str(tmp_path / "python"))

    assert (code, err) == (0, "")
    assert "The planned step, traced on fake:cuda" in out
    assert "reserved, fits" in out
    assert "Not verified on the null CUDA device: " in out


@pytest.mark.long
def test_the_json_names_devices(run: Callable[..., Run]) -> None:  # noqa: F811
    pytest.importorskip("torch")
    sets = [word for override in SMALL for word in ("--set", override)]
    asked = ("recompute", "gpt2", *sets, "--gpu", "a100-40gb", "--budget", "2.3GiB", "--verify", "--device", "fake")
    _, out, _ = run(*asked, "--format", "json")
    document = json.loads(out)

    assert {phase["device"] for phase in document["verified"]} == {"fake:cuda"}
    assert max(phase["planned"] for phase in document["verified"]) == document["peak_bytes"]
