"""Signals end the process wherever they come, also where Python ignores what a callback raises."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

IN_A_CALLBACK = """
import signal, sys, time, weakref
from memcalc.cli.signals import end_by_signals, exit_code
class Watched: pass
end_by_signals()
watched = Watched()
callback = weakref.ref(watched, lambda _: signal.raise_signal(int(sys.argv[1])))
try:
    del watched
    time.sleep(10)
    code = 0
except KeyboardInterrupt:
    code = exit_code()
sys.exit(code)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_a_callback_of_a_weak_reference(number: int, code: int) -> None:
    """It need not wait until a system call returns."""
    words = [sys.executable, "-c", IN_A_CALLBACK, str(int(number))]
    began = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr) == (code, "")
    assert time.monotonic() - began < 8
