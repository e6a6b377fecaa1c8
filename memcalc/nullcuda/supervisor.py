"""Runs a command, and ends it with every process that it started: `python -I -S supervisor.py`.

    supervisor.py ORDERS STATUS GRACE LEFT_BEHIND COMMAND ...

Every process that the command starts is a descendant of this one, in any session and with any environment: orphans
are reparented to the nearest subreaper (prctl(2), PR_SET_CHILD_SUBREAPER), which is this process.

ORDERS is a file descriptor. A byte in it is the number of a signal that ends all descendants. Its end means that its
writer has ended, possibly killed, so that all descendants are ended with SIGTERM. GRACE seconds later they are killed.
When the command has ended, its other processes get LEFT_BEHIND seconds.

STATUS is a file descriptor. It receives "exit CODE", with CODE as in a shell, or "errno NUMBER" if the command could
not be started. This file imports nothing of memcalc, so that it starts within about 20 ms.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

# ruff: noqa: PTH123, PTH208 -- pathlib takes as long to import as all the rest

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
PAUSE = 0.02  # seconds between two polls of the descendants
UNKILLABLE = 5.0  # seconds after which a killed process that is still running, in a system call, is abandoned


class Supervisor:
    """The descendants of this process.

    Args:
        orders: file descriptor, see above.
        grace: seconds between a signal and SIGKILL.
        orphans: seconds for other processes after the command itself has ended.
    """

    def __init__(self, orders: int, grace: float, left_behind: float) -> None:
        self.orders = orders
        self.grace = grace
        self.orphans = left_behind
        self.codes: dict[int, int] = {}  # of children that have ended
        # A child's end writes into a pipe, so that one call waits for it and for orders.
        self.woken, waking = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(waking, False)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self, command: list[str]) -> int:
        """Return the command's exit code, once none of its processes is running."""
        child = subprocess.Popen(command, start_new_session=True).pid  # noqa: S603 -- the user's own command
        number = self.wait_for(child)
        if number:
            self.end(number)
        else:
            self.wait_for_all(self.orphans)
            self.end(signal.SIGTERM)
        self.reap()
        return self.codes.get(child, 128 + signal.SIGKILL)

    def wait_for(self, child: int) -> int:
        """Wait until a child ends, which returns 0, or until a command comes, which returns its signal."""
        while child not in self.codes:
            ready, _, _ = select.select([self.orders, self.woken], [], [])
            if self.orders in ready:
                order = os.read(self.orders, 1)
                return order[0] if order else signal.SIGTERM
            os.read(self.woken, 4096)
            self.reap()
        return 0

    def reap(self) -> None:
        """Collect the exit codes of children that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            self.codes[pid] = 128 - code if code < 0 else code

    def end(self, number: int) -> None:
        """Send all descendants a signal; kill those that do not end in time."""
        self.send(number)
        deadline = self.grace
        while not self.wait_for_all(deadline):
            if deadline == UNKILLABLE:
                return
            deadline = UNKILLABLE
            self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        """Send all descendants a signal. SIGKILL is repeated for processes that they start meanwhile."""
        sent: set[int] = set()
        while new := [pid for pid in descendants() if pid not in sent]:
            for pid in new:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                sent.add(pid)
            if number != signal.SIGKILL:
                return

    def wait_for_all(self, seconds: float) -> bool:
        """Return whether all descendants end in time."""
        deadline = time.monotonic() + seconds
        while True:
            self.reap()
            if not descendants():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(PAUSE)


def descendants() -> list[int]:
    """Return the running descendants of this process. See proc_pid_stat(5)."""
    children: dict[int, list[int]] = {}
    living: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended
            continue
        children.setdefault(int(parent), []).append(int(name))
        if state not in {"Z", "X"}:
            living.add(int(name))
    found, waiting = [], list(children.get(os.getpid(), ()))
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, ())
        found += [pid] if pid in living else []
    return found


def main(orders: str, status: str, grace: str, left_behind: str, *command: str) -> None:
    """Run the command and write how it ended."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor = Supervisor(int(orders), float(grace), float(left_behind))
    try:
        answer = f"exit {supervisor.run(list(command))}"
    except OSError as error:
        answer = f"errno {error.errno}"
    with suppress(BrokenPipeError):  # the reader has ended
        os.write(int(status), answer.encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
