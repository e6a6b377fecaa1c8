"""How far long work has come."""

import io
import itertools
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import memcalc
from memcalc.progress import silent
from memcalc.report.progress import PATIENCE, PAUSE, shown_progress

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_nothing() -> None:
    file = io.StringIO()
    with shown_progress(file) as progress:
        progress("forward_1", 1, 2)

    assert progress is silent
    assert file.getvalue() == ""


def test_quick_work_stays_quiet() -> None:
    """The clock stands still: PATIENCE is never over."""
    file = Terminal()
    with shown_progress(file, clock=lambda: 0.0) as progress:
        for done in range(100):
            progress("forward_1", done, 100)

    assert file.getvalue() == ""


def test_long_work_is_shown_and_not_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is asked at 0, PATIENCE and then twice within each PAUSE: every second call is left out."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    file = Terminal()
    ticks = itertools.chain([0.0, PATIENCE], (PATIENCE + PAUSE * (0.5 + 0.75 * n) for n in itertools.count()))
    with shown_progress(file, clock=lambda: next(ticks)) as progress:
        for done in (10, 20, 30):
            progress("back[ward]_1", done, 60)

    text = file.getvalue()
    assert "back[ward]_1" in text  # names may hold square brackets
    assert "10/60" in text
    assert "20/60" not in text
    assert "30/60" in text


class Watcher:
    """The output for a terminal, without one."""

    def __init__(self) -> None:
        self.told: dict[str, list[tuple[int, int | None]]] = {}

    def __call__(self, what: str, done: int, total: int | None = None) -> None:
        self.told.setdefault(what, []).append((done, total))


def test_a_search_for_layouts_tells_how_many_are_done() -> None:
    watcher = Watcher()
    memcalc.fit("gpt2", "l=2", gpu="h100-80gb", gpus=4, progress=watcher)

    counts = [done for done, _ in watcher.told["layouts over 4 GPUs"]]
    assert counts == list(range(len(counts)))
    assert len(counts) > 10


def test_the_fewest_gpus_tell_which_number_is_tried() -> None:
    watcher = Watcher()
    memcalc.fit("gpt2", gpu="t4", minimize="gpus", progress=watcher)

    assert "layouts on one GPU" in watcher.told


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_check_tells_how_many_files_are_done(jobs: int, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.yaml").write_text("preset: gpt2\n")
    watcher = Watcher()
    memcalc.check(tmp_path, gpu="h100-80gb", jobs=jobs, progress=watcher)

    assert watcher.told == {"configurations": [(1, 3), (2, 3), (3, 3)]}


def test_a_long_log_tells_how_much_is_read(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_bytes((ROOT / "docs/examples/oom.log").read_bytes() + b"step 1 loss 2\n" * 300_000)
    watcher = Watcher()
    memcalc.oom(log, progress=watcher)

    assert watcher.told["MiB of the log"][-1] == (4, 4)


def test_plans_are_counted() -> None:
    watcher = Watcher()
    memcalc.recompute("gpt2", gpu="t4", maximize=True, progress=watcher)

    counts = [done for done, _ in watcher.told["plans"]]
    assert counts == list(range(len(counts)))


def test_commands_draw_it_on_a_terminal_and_nowhere_else(tmp_path: Path) -> None:
    """A search that takes longer than PATIENCE on a terminal; in the next test its standard error is a pipe."""
    command = [sys.executable, "-m", "memcalc", *"fit gpt2 --set l=6 --gpu h100-80gb --gpus 4".split()]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs):
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # how Linux tells that the other end has closed
            while chunk := os.read(ours, 1 << 16):
                shown += chunk
    os.close(ours)

    assert b"layouts over 4 GPUs" in shown


def test_an_interrupt_ends_a_search_at_once() -> None:
    command = [sys.executable, "-m", "memcalc", *"fit deepseek-v3 --gpu h100-80gb --gpus 2048".split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        out, err = process.communicate(timeout=20)

    assert (process.returncode, out, err) == (130, b"", b"")
    assert time.monotonic() - began < 5
