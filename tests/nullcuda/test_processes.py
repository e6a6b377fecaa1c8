"""A command ends with everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memcalc.nullcuda.processes import CommandEnd, marked, run_to_end

# A child in a session of its own, as launchers start their workers.
ORPHAN = "import subprocess, sys, time; subprocess.Popen(['sleep', '60'], start_new_session=True); "


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., CommandEnd]:
    marker = str(tmp_path / "reports")

    def call(code: str, **named: Any) -> CommandEnd:
        ending = run_to_end([sys.executable, "-c", code], os.environ | {"MARK": marker}, **named)
        assert marked(marker) == []
        return ending

    return call


def test_the_exit_code_is_the_commands_own(run: Callable[..., CommandEnd]) -> None:
    assert run("") == CommandEnd(0)
    assert run("import sys; sys.exit(7)") == CommandEnd(7)


def test_a_signal_ends_as_in_a_shell(run: Callable[..., CommandEnd]) -> None:
    assert run("import os; os.kill(os.getpid(), 9)") == CommandEnd(128 + 9)


def test_what_a_command_leaves_behind_is_ended(run: Callable[..., CommandEnd]) -> None:
    assert run(ORPHAN) == CommandEnd(0)


def test_when_the_time_is_over_all_is_ended(run: Callable[..., CommandEnd]) -> None:
    start = time.monotonic()

    ending = run(ORPHAN + "time.sleep(60)", timeout=0.5)

    assert ending.timed_out
    assert ending.code == 128 + signal.SIGTERM
    assert time.monotonic() - start < 10


def test_what_does_not_listen_is_killed(run: Callable[..., CommandEnd], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memcalc.nullcuda.processes.GRACE", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"

    assert run(deaf, timeout=1) == CommandEnd(128 + signal.SIGKILL, timed_out=True)


def test_an_interrupt_ends_all_of_it(run: Callable[..., CommandEnd]) -> None:
    timer = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore interrupts
    timer.start()

    try:
        ending = run(ORPHAN + "time.sleep(60)")
    finally:
        signal.signal(signal.SIGINT, before)

    assert ending.interrupted


# Two more processes: one in the command's session, and one in a session of its own. Their ids are in files.
UNMARKED = """
sleep 60 & echo $! > {here}/same
setsid sh -c 'echo $$ > {here}/other; exec sleep 60' &
exec sleep 60
"""


def lives(file: Path) -> bool:
    """Whether the process lives that has the id in a file."""
    stat = Path("/proc", file.read_text().strip(), "stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def unmarked(tmp_path: Path) -> list[str]:
    """A command with processes that have nothing of our environment."""
    (tmp_path / "script.sh").write_text(UNMARKED.format(here=tmp_path))
    return ["env", "-i", f"PATH={os.environ['PATH']}", "/bin/sh", str(tmp_path / "script.sh")]


@pytest.mark.parametrize("how", ["time-out", "Ctrl-C"])
def test_a_command_without_any_environment_is_ended_with_all_its_sessions(
    tmp_path: Path, unmarked: list[str], how: str
) -> None:
    if how == "Ctrl-C":
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    start = time.monotonic()
    ending = run_to_end(unmarked, dict(os.environ), timeout=1.0 if how == "time-out" else None)

    assert time.monotonic() - start < 10
    assert (ending.timed_out, ending.interrupted) == (how == "time-out", how == "Ctrl-C")
    assert ending.code == 128 + (signal.SIGTERM if how == "time-out" else signal.SIGINT)
    assert not lives(tmp_path / "same")
    assert not lives(tmp_path / "other")


def test_a_command_ends_with_the_process_that_ran_it(tmp_path: Path, unmarked: list[str]) -> None:
    """Killed, that process can end nothing; its supervisor does."""
    code = f"from memcalc.nullcuda.processes import run_to_end; run_to_end({unmarked!r}, {{}})"
    with subprocess.Popen([sys.executable, "-c", code]) as runner:
        await_that((tmp_path / "other").exists)
        runner.kill()

    assert runner.returncode == -signal.SIGKILL
    await_that(lambda: not lives(tmp_path / "same") and not lives(tmp_path / "other"))


def await_that(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until it is so; fail if it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_command_that_cannot_be_started_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("#!/nowhere/python\n")
    (tmp_path / "script").chmod(0o755)

    with pytest.raises(FileNotFoundError, match="script"):
        run_to_end([str(tmp_path / "script")], dict(os.environ))
