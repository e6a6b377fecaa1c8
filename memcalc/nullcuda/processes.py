"""A command with all that it starts: run in a session of its own, and ended without leaving anything behind.

Launchers give their workers sessions of their own, so the command's session does not hold them all. Every process of
a dry run carries the folder of its reports in its environment, and by that it is found in /proc too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

GRACE = 3.0  # seconds between asking a process to end, when it writes its report, and killing it
LEFT_BEHIND = 1.0  # seconds that helpers of a command get to end by themselves after it has ended
PAUSE = 0.02  # seconds between two looks


@dataclass(frozen=True, slots=True)
class Ending:
    """How a command ended."""

    code: int  # its own; 128 + n if signal n ended it
    timed_out: bool = False
    interrupted: bool = False


def run_to_end(
    command: Sequence[str],
    environment: dict[str, str],
    marker: str,
    *,
    timeout: float | None = None,
    stdout: int | IO[str] | None = None,
) -> Ending:
    """Run a command until it ends, the time is over, or the user interrupts; nothing of it lives on afterwards.

    Args:
        command: what to run.
        environment: all of it; `marker` is one of its values, and no other process has it.
        marker: by which the processes are found.
        timeout: seconds; None: as long as it takes.
        stdout: where its output goes; None: where ours does.
    """
    timed_out = interrupted = False
    with subprocess.Popen(command, env=environment, stdout=stdout, start_new_session=True) as child:  # noqa: S603 -- the user's own command
        try:
            child.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            end_all(marker, signal.SIGTERM, child.pid)
        except KeyboardInterrupt:
            interrupted = True
            end_all(marker, signal.SIGINT, child.pid)
        finally:
            _wait(lambda: not marked(marker, child.pid), LEFT_BEHIND)
            end_all(marker, signal.SIGTERM, child.pid)
        code = child.wait()
    return Ending(128 - code if code < 0 else code, timed_out, interrupted)


def end_all(marker: str, number: signal.Signals, session: int | None = None) -> None:
    """Send a signal to every marked process and to a session; kill those that do not end of it in time.

    Args:
        marker: see `marked`.
        number: the signal.
        session: see `marked`.
    """
    for pid in marked(marker, session):
        _send(pid, number)
    if not _wait(lambda: not marked(marker, session), GRACE):
        for pid in marked(marker, session):
            _send(pid, signal.SIGKILL)


def marked(marker: str, session: int | None = None) -> list[int]:
    """Return the living processes that belong to a command, this one excepted.

    Args:
        marker: a value that their environment has.
        session: id of the command's session; its processes belong to it whatever their environment is.
    """
    found = []
    needle = f"={marker}\0".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):  # another user's, or gone
            if (session is not None and _session_of(entry) == session) or needle in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def _session_of(process: Path) -> int | None:
    """The session of a living process; None for a zombie. See proc_pid_stat(5)."""
    state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
    return None if state in {"Z", "X"} else int(session)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while not (answer := done()) and time.monotonic() < end:
        time.sleep(PAUSE)
    return answer
