"""`with null_device(...)`: child processes of a program on simulated GPUs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import memcalc
from memcalc.errors import InputError, OutOfMemory
from memcalc.nullcuda.result import DONE, FAILED, OUT_OF_MEMORY
from tests.nullcuda.functions import fail, hold, leave

GIB = 2**30
ROOT = Path(__file__).parents[2]


def test_functions_and_commands_find_the_gpu(dry_run_here: Path, null_python: str) -> None:
    before = dict(os.environ)
    with memcalc.null_device("h100-80gb", python=null_python) as device:
        assert device.call(hold, 3) == f"{3 * GIB} on NVIDIA H100 80GB HBM3"
        assert device.result.allocated_bytes == 3 * GIB
        script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.nullcuda.functions import hold; hold(5)"
        subprocess.run([null_python, "-c", script], check=True)

    assert os.environ == before
    assert device.result.outcome == DONE
    assert sorted(usage.allocated_bytes for usage in device.result.usages) == [3 * GIB, 5 * GIB]
    assert device.result.device_bytes < 70 * GIB


def test_what_goes_wrong_in_the_child_is_raised(dry_run_here: Path, null_python: str) -> None:
    with memcalc.null_device("h100-80gb", python=null_python) as device:
        with pytest.raises(RuntimeError, match="fail failed with ValueError: no luck"):
            device.call(fail, what="luck")
        with pytest.raises(RuntimeError, match="leave ended with exit code 5"):
            device.call(leave)
        with pytest.raises(OutOfMemory, match=r"Tried to allocate 100\.00 GiB"):
            device.call(hold, 100)

    assert device.result.outcome == OUT_OF_MEMORY
    assert device.result.fits is False


def test_an_unknown_gpu_is_refused_at_once() -> None:
    with pytest.raises(InputError, match="h1000"):
        memcalc.null_device("h1000")


@pytest.mark.long
def test_a_command_is_a_verb_too(dry_run_here: Path, null_python: str) -> None:
    """Without torch, which takes seconds to import."""
    run = memcalc.dry_run([null_python, "-c", "raise SystemExit(7)"], gpu="t4")

    assert (run.outcome, run.exit_code, run.gpu.name) == (FAILED, 7, "t4")


@pytest.mark.long
def test_a_command_of_torch_is_a_verb_too(dry_run_here: Path, null_python: str) -> None:
    (dry_run_here / "script.py").write_text("import torch; torch.empty(1 << 30, dtype=torch.uint8, device='cuda')")

    run = memcalc.dry_run([null_python, "script.py"], gpu="t4")

    assert (run.outcome, run.allocated_bytes) == (DONE, GIB)
