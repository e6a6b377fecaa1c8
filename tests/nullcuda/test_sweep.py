"""The search for the largest micro-batch: which sizes are tried, how the command is written, what is said."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.cli.app import main
from memcalc.nullcuda.sweep import LARGEST, with_micro_batch
from memcalc.units import largest_that_fits


@given(st.integers(0, LARGEST))
def test_the_search_finds_the_largest_that_fits(largest: int) -> None:
    tried: list[int] = []

    def fits_at(size: int) -> bool:
        tried.append(size)
        return size <= largest

    assert largest_that_fits(fits_at, LARGEST) == largest
    assert len(tried) == len(set(tried)) <= 2 * max(1, largest).bit_length() + 1


def test_a_command_that_does_not_heed_the_flag_ends_the_search() -> None:
    assert largest_that_fits(lambda _: True, LARGEST) == LARGEST


@pytest.mark.parametrize(
    ("flag", "command", "expected"),
    [
        ("--bs", "train.py --bs 4 --lr 1", "train.py --bs 8 --lr 1"),
        ("--bs", "train.py --bs=4", "train.py --bs=8"),
        ("--bs", "train.py", "train.py --bs 8"),
        ("train.bs", "train.py train.bs=4 x=1", "train.py train.bs=8 x=1"),
        ("train.bs", "train.py x=1", "train.py x=1 train.bs=8"),
    ],
)
def test_the_flag_is_written_as_the_command_has_it(flag: str, command: str, expected: str) -> None:
    assert with_micro_batch(command.split(), flag, 8) == tuple(expected.split())


def test_the_flag_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry-run", "--gpu", "t4", "--sweep", "--", "python", "train.py"]) == 2
    assert "--micro-batch-flag" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", ["1,x", "0,2"])
def test_sizes_are_numbers_from_one_on(capsys: pytest.CaptureFixture[str], sizes: str) -> None:
    command = ["dry-run", "--gpu", "t4", "--sweep", "--micro-batch-flag", "-b", "--micro-batches", sizes]

    assert main([*command, "--", "python", "train.py"]) == 2
    assert "--micro-batches" in capsys.readouterr().err


HOLDS = """
import sys, torch
held = torch.empty((int(sys.argv[2]) << 30) * 5 // 2, dtype=torch.uint8, device="cuda")
"""


@pytest.mark.long
def test_a_sweep_on_the_device(dry_run_here: Path, null_python: str, capsys: pytest.CaptureFixture[str]) -> None:
    """2.5 GiB a piece and 0.47 GiB beside: a T4's 14.56 GiB hold 5 of them. 1, 2, 4 fit, 8 and 6 do not, 5 does."""
    (dry_run_here / "script.py").write_text(HOLDS)
    command = ["dry-run", "--gpu", "t4", "--sweep", "--micro-batch-flag", "-b"]
    with redirect_stdout(io.StringIO()) as out:
        assert main([*command, "--format", "json", "--", null_python, "script.py"]) == 0

    document = json.loads(out.getvalue())
    assert document["largest_micro_batch_size"] == 5
    assert [run["micro_batch_size"] for run in document["runs"]] == [1, 2, 4, 5, 6, 8]
    assert [run["result"]["fits"] for run in document["runs"]] == [True, True, True, True, False, False]
    capsys.readouterr()
    with redirect_stdout(io.StringIO()) as out:
        assert main([*command, "--micro-batches", "7,9", "--assert-fits", "--", null_python, "script.py"]) == 1
    assert "NONE FITS." in out.getvalue()
