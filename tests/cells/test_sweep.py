"""Cells run in processes of their own, are kept as they end, and are not run twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memcalc import api
from memcalc.cells import local_processes
from memcalc.cells.cell import GridCell, GridCells
from memcalc.errors import InputError, Unavailable
from tests.cells.stub_child import GIB

Sweep = Callable[..., GridCells]
FILE = Path("cells.jsonl")


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Sweeps over gpt2 with the runs of `stub_child`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_processes, "CHILD", "tests.cells.stub_child")

    def call(axes: dict[str, list[Any]], **named: Any) -> GridCells:
        return api.sweep_runs("gpt2", axes, cells=FILE, gpu="a100-80gb", **{"workers": 2} | named)

    return call


def runs() -> list[str]:
    return sorted(Path("runs").read_text().splitlines())


def test_each_cell_has_the_answer_of_its_run(sweep: Sweep) -> None:
    """4 GiB fit the stub's GPU, 5 do not; 5 heads do not divide, so these cells are not run."""
    found = sweep({"b": [4, 5], "num_attention_heads": [12, 5]})

    answers = [cell.answer for cell in found.cells]
    assert [(answer.outcome, answer.verdict, answer.allocated_bytes) for answer in answers if answer] == [
        ("measured", "fits", 4 * GIB),
        ("invalid", None, None),
        ("measured", "does-not-fit", 5 * GIB),
        ("invalid", None, None),
    ]
    assert found.fields == ("micro_batch_size", "num_attention_heads")
    assert runs() == ["4 12", "5 12"]
    assert answers[1] is not None
    assert "hidden_size = 768" in answers[1].reason


def test_an_interrupted_sweep_goes_on_where_it_was(sweep: Sweep) -> None:
    """The third cell that ends is the last; four of the six are run after it, each once."""
    axes = {"b": [1, 2, 3, 4, 5, 6]}

    def interrupt(_: GridCell | None, done: int, __: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(axes, tell=interrupt, workers=1)
    assert len(FILE.read_text().splitlines()) == 2

    told: list[tuple[bool, int, int]] = []
    found = sweep(axes, tell=lambda cell, done, total: told.append((cell is None, done, total)), workers=1)

    assert found.used == 2
    assert told == [(True, 2, 6), (False, 3, 6), (False, 4, 6), (False, 5, 6), (False, 6, 6)]
    assert [cell.answer and cell.answer.allocated_bytes for cell in found.cells] == [n * GIB for n in range(1, 7)]
    assert sweep(axes).used == 6
    assert sorted({*runs()}) == [f"{n} 12" for n in range(1, 7)]


def test_a_process_that_is_killed_loses_its_cell_only(sweep: Sweep) -> None:
    """The same sweep runs it again; what failed by itself is not repeated."""
    axes = {"num_layers": [2, 3, 4, 5]}
    answers = [cell.answer for cell in sweep(axes).cells]

    assert [answer.outcome for answer in answers if answer] == ["measured", "lost", "failed", "measured"]
    assert [answer.reason for answer in answers if answer][1:3] == [
        "the process that ran the cell was ended by SIGKILL",
        "ValueError: four",
    ]
    Path("spared").touch()
    again = sweep(axes)
    assert [cell.answer and cell.answer.outcome for cell in again.cells] == [
        "measured",
        "measured",
        "failed",
        "measured",
    ]
    assert again.used == 3
    assert runs() == ["1 2", "1 3", "1 3", "1 4", "1 5"]


def test_a_line_that_is_not_whole_is_run_again(sweep: Sweep) -> None:
    sweep({"b": [1, 2]}, workers=1)
    FILE.write_bytes(FILE.read_bytes()[:-20])

    assert sweep({"b": [1, 2]}).used == 1
    assert sweep({"b": [1, 2]}).used == 2


def test_a_file_of_something_else_is_not_written_to(sweep: Sweep) -> None:
    for content in ("to do:\n- laundry\n", "preset: gpt2", '{"model_type": "llama"}', '{\n "schema_version": 2\n}\n'):
        FILE.write_text(content)

        with pytest.raises(InputError, match=r"--cells cells\.jsonl: holds something other than cells\. Name a file"):
            sweep({"b": [1]})
        assert FILE.read_text() == content
    assert not Path("runs").exists()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of two cells that ran."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cells"))
        patch.setattr(local_processes, "CHILD", "tests.cells.stub_child")
        api.sweep_runs("gpt2", {"b": [1, 2]}, cells=FILE, gpu="a100-80gb", workers=2)
        return FILE.read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allocated_bytes", "4"),
        ("allocated_bytes", 10**400),
        ("device_bytes", True),
        ("outcome", ["measured"]),
        ("verdict", "maybe"),
        ("seconds", float("nan")),
        ("reason", None),
        ("digest", {}),
        ("peak_phase", 1),
    ],
)
def test_a_line_with_a_value_of_something_else_is_named(
    name: str, value: object, sweep: Sweep, lines: list[str]
) -> None:
    first, second = lines
    FILE.write_text(f"{first}\n{json.dumps(json.loads(second) | {name: value})}\n")

    with pytest.raises(InputError, match=r"cells\.jsonl:2: this line is not a cell of a sweep: a value is"):
        sweep({"b": [3]})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a system without /dev/full")
def test_an_answer_that_cannot_be_kept_is_shown_and_ends_the_sweep(sweep: Sweep) -> None:
    FILE.symlink_to("/dev/full")
    found = sweep({"b": [1, 2, 3]}, workers=1)

    assert [cell.answer and cell.answer.allocated_bytes for cell in found.cells] == [GIB]
    assert str(found.unkept).startswith("cells.jsonl could not be written: No space left on device. The result is")


def test_a_pipe_is_not_waited_for(sweep: Sweep) -> None:
    os.mkfifo(FILE)

    with pytest.raises(InputError, match=r"--cells cells\.jsonl: this is a pipe, not a file"):
        sweep({"b": [1]})


def test_words_of_a_command_that_no_file_can_be_named_by_and_large_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program on the command line is longer than a file's name; weights are not read for each cell."""
    from memcalc.cells.requests import command_cells

    monkeypatch.setattr("memcalc.cells.requests.find_torch", lambda _: type("Torch", (), {"version": "2.13.0"}))
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(1 << 40)  # takes no space on the disk
    words = ("python", "-c", "pass  # " + "x" * 5_000, str(weights), "{b}")
    found = [cell.request["files"] for cell in command_cells(words, {"b": [1, 2]}, "t4", options={})]

    assert [[*files] for files in found] == [[str(weights)]] * 2
    assert found[0][str(weights)].startswith(f"{1 << 40} bytes of ")


def test_what_differs_is_run(sweep: Sweep) -> None:
    """Other steps are another run."""
    sweep({"b": [1]})

    assert sweep({"b": [1]}, steps=2).used == 0
    assert sweep({"b": [1]}, steps=2).used == 1


ENDS = """
import os, subprocess, sys, threading
from memcalc.cells.child import end_with_parent
threading.Thread(target=end_with_parent, daemon=True).start()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="a system without /proc")
def test_a_run_ends_with_the_process_that_started_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        grandchild = int(run.stdout.readline())
        run.stdin.close()

        assert run.wait(20) == -signal.SIGKILL
    stat = Path("/proc", str(grandchild), "stat")
    deadline = time.monotonic() + 20
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline


COMMAND = ["{sys}", "train.py", "--batch", "{batch}", "--json", '{"a": 1}']


@pytest.mark.parametrize(
    ("axes", "gpu", "message"),
    [
        ({"size": [1]}, "t4", r"size is varied, but \{size\} is not in the command"),
        ({"batch": [1]}, None, "a dry run needs a GPU"),
        ({"batch": [1]}, "t5", "t5"),
    ],
)
def test_a_command_has_what_is_varied(
    axes: dict[str, list[Any]], gpu: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memcalc.cells.requests.find_torch", lambda _: type("Torch", (), {"version": "2.13.0"}))
    command = [sys.executable, *COMMAND[1:]]

    with pytest.raises(InputError, match=message):
        api.sweep_command(command, axes, gpu=gpu, cells=FILE)


def test_the_values_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other braces stay, and a script that was changed is another program."""
    from memcalc.cells.requests import command_cells

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memcalc.cells.requests.find_torch", lambda _: type("Torch", (), {"version": "2.13.0"}))
    Path("train.py").write_text("1")

    def cells() -> list[GridCell]:
        return command_cells([sys.executable, *COMMAND[1:]], {"batch": [1, 2], "gpu": ["t4", "l4"]}, None, options={})

    found = cells()
    assert [(cell.request["command"][3], cell.request["gpu"]) for cell in found] == [
        ("1", "t4"),
        ("1", "l4"),
        ("2", "t4"),
        ("2", "l4"),
    ]
    assert found[0].request["command"][5] == '{"a": 1}'
    assert [cell.digest for cell in cells()] == [cell.digest for cell in found]
    Path("train.py").write_text("2")
    assert not {cell.digest for cell in cells()} & {cell.digest for cell in found}


def test_secrets_of_a_command_are_not_in_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memcalc.cells.requests.find_torch", lambda _: type("Torch", (), {"version": "2.13.0"}))
    monkeypatch.setattr("memcalc.cells.cell_sweep.run_cells", lambda name, *_, **__: name)
    command = [sys.executable, "train.py", "--hf-token", "hf_abcdefghijklmnop", "--batch", "{b}"]

    name = str(api.sweep_command(command, {"b": [1]}, gpu="t4", cells=FILE))
    assert name.endswith("train.py --hf-token '***' --batch '{b}'")


def test_dask_that_is_not_installed_is_said(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)

    with pytest.raises(Unavailable, match=r"pip install 'dask>=2025\.1' 'distributed>=2025\.1'"):
        sweep({"b": [1]}, scheduler="tcp://127.0.0.1:1")
