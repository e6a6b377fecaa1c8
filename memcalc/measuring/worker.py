"""Worker process that measures on request: `python -m memcalc.measuring.worker`.

torch is imported once. Each job runs in a fork, made before anything uses CUDA, so no run sees the state of another.
Jobs are read from standard input and answers written to standard output, one line each; the client waits for an answer
before it sends the next job. When standard input ends, because the client is done or gone, the current run is killed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import selectors
import signal
import sys
import traceback
from typing import NoReturn

from memcalc.measuring.job import encoded, job_from

INPUT = 0
CHUNK = 1 << 16


def main() -> None:
    """Serve jobs until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client handles Ctrl-C
    replies = os.dup(1)
    os.dup2(2, 1)  # output of libraries is sent to standard error, separate from the answers
    try:
        # Imported once for all forks; the first optimizer step imports torch._dynamo.
        for name in ("torch._dynamo", "memcalc.measuring.run_process"):
            importlib.import_module(name)
    except ImportError as error:
        _write(replies, encoded({"refused": ["Unavailable", f"the measuring process lacks a package: {error}."]}))
        return
    _write(replies, encoded({"ready": os.getpid()}))
    serve(replies)


def serve(replies: int) -> None:
    """Answer jobs, one at a time."""
    lines = InputLines()
    while (line := lines.next()) is not None:
        if not hasattr(os, "fork"):  # Windows: one job per process
            _write(replies, _answered(line))
            return
        preload(line)
        answer = _forked(line)
        if answer is None:
            return
        _write(replies, answer)


def preload(line: str) -> None:
    """Import transformers once, for all later runs that need it, since the import takes seconds.

    Not if torchao is installed, which transformers then imports: torchao queries the GPU's capability on import, and a
    process that has initialized CUDA cannot be forked.
    """
    training = json.loads(line).get("spec", {}).get("training", {})
    if training.get("implementation") == "huggingface" and importlib.util.find_spec("torchao") is None:
        # An exception is raised again in the fork, which reports it.
        with contextlib.suppress(Exception):
            importlib.import_module("memcalc.step.huggingface")


class InputLines:
    """Standard input by lines, unbuffered, so that a selector can also wait for its end."""

    def __init__(self) -> None:
        self._rest = b""

    def next(self) -> str | None:
        """Return the next line; None at the end."""
        while b"\n" not in self._rest:
            chunk = os.read(INPUT, CHUNK)
            if not chunk:
                return None
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


def _forked(line: str) -> str | None:
    """Return the answer of a forked process; None if the client is gone."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receiving)
        _be_child(line, sending)
    os.close(sending)
    text, wanted = b"", True
    with selectors.DefaultSelector() as selector:
        selector.register(receiving, selectors.EVENT_READ)
        selector.register(INPUT, selectors.EVENT_READ)
        open_ = True
        while open_ and wanted:
            for key, _ in selector.select():
                if key.fd == INPUT:
                    wanted = False  # the client sends nothing before the answer, so this is the end of input
                else:
                    chunk = os.read(receiving, CHUNK)
                    text += chunk
                    open_ = bool(chunk)
    os.close(receiving)
    if not wanted:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not wanted:
        return None
    if text.endswith(b"\n"):
        return text.decode()
    return encoded({"ended": os.waitstatus_to_exitcode(status)})


def _be_child(line: str, sending: int) -> NoReturn:
    """Answer in the forked process, and exit without the parent's clean-up."""
    code = 1
    try:
        os.close(INPUT)
        _write(sending, _answered(line))
        code = 0
    except BaseException:  # noqa: BLE001 -- reported by the exit code and on standard error
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _answered(line: str) -> str:
    from memcalc.measuring.run_process import answer, describe

    asked = json.loads(line)
    return encoded(describe(asked["describe"]) if "describe" in asked else answer(job_from(line)))


def _write(descriptor: int, text: str) -> None:
    content = text.encode()
    with contextlib.suppress(BrokenPipeError):  # the client is gone
        while content:
            content = content[os.write(descriptor, content) :]


if __name__ == "__main__":
    main()
