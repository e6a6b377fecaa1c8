"""A command with all that it starts: run under a supervisor, and ended without leaving anything behind.

The supervisor (`supervisor.py`) finds every process of the command, and ends them when this process is killed, too.
Where it was killed itself, what is left is found by its environment, in which every process of a dry run has the
directory of its reports, unless it was started without one.
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
LEFT_BEHIND = 1.0  # seconds that helpers of a command get to end by themselves after it has ended
PAUSE = 0.02  # seconds between two looks

SUPERVISOR = Path(__file__).with_name("supervisor.py")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a command ended."""

    code: int  # its own; 128 + n if signal n ended it
    timed_out: bool = False
    interrupted: bool = False


def run_to_end(
    command: Sequence[str],
    environment: dict[str, str],
    *,
    timeout: float | None = None,
    stdout: int | IO[str] | None = None,
) -> Ending:
    """Run a command until it ends, the time is over, or the user interrupts; nothing of it lives on afterwards.

    Args:
        command: what to run.
        environment: all of it.
        timeout: seconds; None: as long as it takes.
        stdout: where its output goes; None: where ours does.

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
        os.close(ordering)  # which ends the command where we end without waiting for it
        os.close(status)
    if kind == "errno":
        raise OSError(int(number), os.strerror(int(number)), command[0])
    code = int(number) if kind == "exit" else 128 + signal.SIGKILL  # the supervisor was killed
    return Ending(code, timed_out, interrupted)


def _order(ordering: int, number: signal.Signals) -> None:
    with suppress(BrokenPipeError):  # it has ended meanwhile
        os.write(ordering, bytes([number]))


def end_all(marker: str) -> None:
    """End every marked process: those that do not end in time of SIGTERM are killed.

    Args:
        marker: see `marked`.
    """
    for pid in marked(marker):
        _send(pid, signal.SIGTERM)
    if not _wait(lambda: not marked(marker), GRACE):
        for pid in marked(marker):
            _send(pid, signal.SIGKILL)


def marked(marker: str) -> list[int]:
    """Return the living processes that have a value in their environment, this one excepted."""
    found = []
    needle = f"={marker}\0".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):  # another user's, or gone
                if needle in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while not (answer := done()) and time.monotonic() < end:
        time.sleep(PAUSE)
    return answer
