"""Execution of a command with all its processes: run under a supervisor, and ended without leaving any behind.

The supervisor (`supervisor.py`) finds every process of the command, and ends them also when this process is killed. If
the supervisor itself was killed, remaining processes are found by their environment: every process of a dry run has
the directory of its reports in it, unless it was started without one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

GRACE = 3.0  # seconds between asking a process to end, when it writes its report, and killing it
LEFT_BEHIND = 1.0  # seconds for helper processes to end after the command has ended
PAUSE = 0.02  # seconds between two polls

SUPERVISOR = Path(__file__).with_name("supervisor.py")


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How a command ended."""

    code: int  # its own exit code; 128 + n if signal n ended it
    timed_out: bool = False
    interrupted: bool = False


def run_to_end(
    command: Sequence[str],
    environment: dict[str, str],
    *,
    timeout: float | None = None,
    stdout: int | IO[str] | None = None,
) -> CommandEnd:
    """Run a command until it ends, times out, or the user interrupts it; none of its processes is left running.

    Args:
        command: the command to run.
        environment: its complete environment.
        timeout: seconds; None: no limit.
        stdout: destination of its output; None: this process's.

    Raises:
        OSError: the command cannot be started.
    """
    timed_out = interrupted = False
    orders, ordering = os.pipe()
    status, writing = os.pipe()
    words = [str(SUPERVISOR), str(orders), str(writing), str(GRACE), str(LEFT_BEHIND), *command]
    try:
        child = subprocess.Popen(  # noqa: S603 -- the user's own command
            [sys.executable, "-I", "-S", *words],
            env=environment,
            stdout=stdout,
            pass_fds=(orders, writing),
            start_new_session=True,
        )
    finally:
        os.close(orders)
        os.close(writing)
    try:
        try:
            child.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            _order(ordering, signal.SIGTERM)
        except KeyboardInterrupt:
            interrupted = True
            _order(ordering, signal.SIGINT)
        child.wait()
        kind, _, number = os.read(status, 64).decode().partition(" ")
    finally:
        os.close(ordering)  # the supervisor then ends the command, also if this process no longer waits
        os.close(status)
    if kind == "errno":
        raise OSError(int(number), os.strerror(int(number)), command[0])
    code = int(number) if kind == "exit" else 128 + signal.SIGKILL  # the supervisor was killed
    return CommandEnd(code, timed_out, interrupted)


def _order(ordering: int, number: signal.Signals) -> None:
    with suppress(BrokenPipeError):  # it has ended meanwhile
        os.write(ordering, bytes([number]))


def end_all(marker: str) -> None:
    """End every marked process; processes that ignore SIGTERM for `GRACE` seconds are killed.

    Args:
        marker: see `marked`.
    """
    for pid in marked(marker):
        _send(pid, signal.SIGTERM)
    if not _wait(lambda: not marked(marker), GRACE):
        for pid in marked(marker):
            _send(pid, signal.SIGKILL)


def marked(marker: str) -> list[int]:
    """Return the running processes with this value in their environment, except for this one."""
    found = []
    needle = f"={marker}\0".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):  # another user's, or ended
                if needle in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    """Return whether the condition became true in time."""
    end = time.monotonic() + seconds
    while not (answer := done()) and time.monotonic() < end:
        time.sleep(PAUSE)
    return answer
