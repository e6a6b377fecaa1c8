"""A result with an unwritable file is printed, the file is named, and the exit code is 3."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memcalc.cli.app import main


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without pipes that have names")
@pytest.mark.parametrize(
    "words",
    [
        "estimate gpt2 --html FILE.html",
        "fit gpt2 --gpu t4 --gpus 1 --write FILE.yaml --as axolotl",
        "sweep gpt2 --vary b=1,2 --output FILE.csv",
        "recompute gpt2 --gpu t4 --write FILE.yaml",
        "check gpt2 --gpu t4 --report json=FILE.json",
    ],
)
def test_a_pipe_that_nobody_reads(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = words.partition("FILE")[2].partition(" ")[0]
    os.mkfifo(f"FILE{file}")
    code = main(words.split())
    printed = capsys.readouterr()

    assert (code, printed.err) == (
        3,
        f"error: FILE{file} could not be written: No such device or address. Name another file.\n",
    )
    assert len(printed.out) > 200
    assert "Wrote" not in printed.out
