"""A command ends with everything that it started."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memcalc.nullcuda.processes import Ending, marked, run_to_end

# A child in a session of its own, as launchers start their workers.
ORPHAN = "import subprocess, sys, time; subprocess.Popen(['sleep', '60'], start_new_session=True); "


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ending]:
    marker = str(tmp_path / "reports")

    def call(code: str, **named: Any) -> Ending:
        ending = run_to_end([sys.executable, "-c", code], os.environ | {"MARK": marker}, marker, **named)
        assert marked(marker) == []
        return ending

    return call


def test_the_exit_code_is_the_commands_own(run: Callable[..., Ending]) -> None:
    assert run("") == Ending(0)
    assert run("import sys; sys.exit(7)") == Ending(7)


def test_a_signal_ends_as_in_a_shell(run: Callable[..., Ending]) -> None:
    assert run("import os; os.kill(os.getpid(), 9)") == Ending(128 + 9)


def test_what_a_command_leaves_behind_is_ended(run: Callable[..., Ending]) -> None:
    assert run(ORPHAN) == Ending(0)


def test_when_the_time_is_over_all_is_ended(run: Callable[..., Ending]) -> None:
    start = time.monotonic()

    ending = run(ORPHAN + "time.sleep(60)", timeout=0.5)

    assert ending.timed_out
    assert ending.code == 128 + signal.SIGTERM
    assert time.monotonic() - start < 10


def test_what_does_not_listen_is_killed(run: Callable[..., Ending], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memcalc.nullcuda.processes.GRACE", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"

    assert run(deaf, timeout=1) == Ending(128 + signal.SIGKILL, timed_out=True)


def test_an_interrupt_ends_all_of_it(run: Callable[..., Ending]) -> None:
    timer = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore interrupts
    timer.start()

    try:
        ending = run(ORPHAN + "time.sleep(60)")
    finally:
        signal.signal(signal.SIGINT, before)

    assert ending.interrupted


@pytest.mark.parametrize("how", ["time-out", "Ctrl-C"])
def test_a_command_without_any_environment_is_ended_with_its_group(tmp_path: Path, how: str) -> None:
    """Its processes do not have the marker: they are known by the command's session."""
    script = tmp_path / "script.sh"
    script.write_text(f"sleep 60 & echo $! > {tmp_path}/pid; exec sleep 60\n")
    command = ["env", "-i", "/bin/sh", str(script)]
    if how == "Ctrl-C":
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    start = time.monotonic()
    ending = run_to_end(command, dict(os.environ), str(tmp_path), timeout=1.0 if how == "time-out" else None)

    assert time.monotonic() - start < 10
    assert (ending.timed_out, ending.interrupted) == (how == "time-out", how == "Ctrl-C")
    assert ending.code == 128 + (signal.SIGTERM if how == "time-out" else signal.SIGINT)
    child = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"
