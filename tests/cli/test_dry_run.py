"""`memcalc dry-run` on the command line: what is refused, and with which exit code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memcalc.cli.app import main
from memcalc.cli.dry_run import _exit_code
from memcalc.nullcuda.result import DONE, FAILED, INTERRUPTED, OUT_OF_MEMORY, STOPPED, TIMED_OUT, DryRun
from memcalc.spec.hardware.gpus import find_gpu


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["dry-run", *arguments])
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err


def test_a_gpu_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refused(capsys, "--", "python", "train.py")

    assert code == 2
    assert "--gpu" in message


def test_an_unknown_gpu_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refused(capsys, "--gpu", "h1000", "--", sys.executable, "train.py")

    assert code == 2
    assert "'h1000' is not a known GPU" in message


def test_an_unknown_command_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refused(capsys, "--gpu", "h100-80gb", "--", "pyhton", "train.py")

    assert code == 2
    assert "'pyhton' is not an executable command" in message


def test_more_gpus_than_a_machine_has_are_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refused(capsys, "--gpu", "h100-80gb", "--gpus", "1000", "--", sys.executable, "train.py")

    assert code == 2
    assert "gpus = 1000" in message


def test_a_build_of_torch_without_cuda_is_missing_something(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch is a CUDA build")

    code, message = refused(capsys, "--gpu", "h100-80gb", "--", sys.executable, "train.py")

    assert code == 3
    assert "is a CPU build" in message
    assert "pip install --no-deps 'torch===" in message


def test_a_record_that_cannot_be_is_refused_before_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = ("--gpu", "h100-80gb", "--", sys.executable, "train.py")

    code, message = refused(capsys, "--record", str(tmp_path), *words)
    assert (code, f"--record: {tmp_path} is a directory" in message) == (2, True)
    code, message = refused(capsys, "--record", str(tmp_path / "file" / "r.json"), *words)
    assert (code, "file: " in message) == (2, True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_record_on_a_full_disk_does_not_lose_the_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = DryRun(("true",), find_gpu("h100-80gb"), 1, DONE, 0, 1.0, ())
    monkeypatch.setattr("memcalc.nullcuda.run", lambda *_, **__: found)

    code = main(["dry-run", "--gpu", "h100-80gb", "--record", "/dev/full", "--", "true"])

    captured = capsys.readouterr()
    assert code == 3
    assert "nothing was measured" in " ".join(captured.out.split())
    assert "/dev/full could not be written: No space left on device." in captured.err


def test_a_rank_that_is_none_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    code, message = refused(capsys, "--gpu", "h100-80gb", "--world-size", "8", "--rank", "8", "--", sys.executable, "x")

    assert (code, "is out of range. Choose 0 to 7." in message) == (2, True)


@pytest.mark.parametrize(
    ("outcome", "own", "unfit", "code"),
    [
        (DONE, 0, False, 0),
        (STOPPED, 0, False, 0),
        (DONE, 0, True, 1),
        (FAILED, 7, False, 7),
        (FAILED, 7, True, 7),
        (FAILED, 1, False, 1),
        (FAILED, 1, True, 2),  # 1 would say that it does not fit
        (OUT_OF_MEMORY, 1, False, 4),
        (OUT_OF_MEMORY, 1, True, 1),
        (TIMED_OUT, 143, True, 124),
        (INTERRUPTED, 130, True, 130),
    ],
)
def test_exit_codes(outcome: str, own: int, unfit: bool, code: int) -> None:
    assert _exit_code(outcome, own, fits=not unfit, asserted=unfit) == code
