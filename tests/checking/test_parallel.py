"""Many files on several cores, and what becomes of the processes when the one that started them is ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SLEEPS = """
import time
from memcalc.checking.check import mapped

def sleep(seconds):
    print("begun", flush=True)
    time.sleep(seconds)

mapped(sleep, [30] * 8, 2)
"""


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them(number: signal.Signals) -> None:
    """At once, although each has half a minute of work before it."""
    with subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        children = children_of(process.pid)
        began = time.monotonic()
        process.send_signal(number)
        process.wait(20)
        while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() - began < 20:
            time.sleep(0.05)

    assert len(children) == 2
    assert time.monotonic() - began < 20
