"""Measures in a process of its own, as often as it is asked: `python -m memcalc.measuring.worker`.

torch is imported once; each job is forked off before anything touches CUDA, so that no run finds what another left.
Jobs come in on standard input, answers go out on standard output, a line each; whoever asks waits for the answer before
it asks again. When standard input ends, because the other side is done or gone, the run that is on its way is killed.
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
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other side decides what an interrupt means
    replies = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        # Once, for all that are forked; the compiler's package is what the first optimizer step imports.
        for name in ("torch._dynamo", "memcalc.measuring.child"):
            importlib.import_module(name)
    except ImportError as error:
        _write(replies, encoded({"refused": ["Unavailable", f"the measuring process lacks a package: {error}."]}))
        return
    _write(replies, encoded({"ready": os.getpid()}))
    serve(replies)


def serve(replies: int) -> None:
    """Answer jobs, one after the other."""
    lines = Lines()
    while (line := lines.next()) is not None:
        if not hasattr(os, "fork"):  # Windows: one job, then whoever asks starts another process
            _write(replies, _answered(line))
            return
        preload(line)
        answer = _forked(line)
        if answer is None:
            return
        _write(replies, answer)


def preload(line: str) -> None:
    """Import what takes seconds, once for all runs that need it: transformers, when the first of its models comes.

    Not where torchao is installed, which transformers then imports: it asks for the card's capability as it is
    imported, and a CUDA that has been asked cannot be forked.
    """
    training = json.loads(line).get("spec", {}).get("training", {})
    if training.get("implementation") == "huggingface" and importlib.util.find_spec("torchao") is None:
        # Any exception may come of it, and comes again in the fork, whose answer it is.
        with contextlib.suppress(Exception):
            importlib.import_module("memcalc.step.huggingface")


class Lines:
    """Standard input by lines, unbuffered: so that its end can be waited for as well."""

    def __init__(self) -> None:
        self._rest = b""

    def next(self) -> str | None:
        """The next line; None at the end."""
        while b"\n" not in self._rest:
            chunk = os.read(INPUT, CHUNK)
            if not chunk:
                return None
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


def _forked(line: str) -> str | None:
    """The answer of a process of its own; None if nobody waits for it any more."""
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
                    wanted = False  # nobody sends before the answer: this is the end
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
    """The forked process: answers, and ends without the clean-up of the process that it is a copy of."""
    code = 1
    try:
        os.close(INPUT)
        _write(sending, _answered(line))
        code = 0
    except BaseException:  # noqa: BLE001 -- told by its exit code, and on standard error
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _answered(line: str) -> str:
    from memcalc.measuring.child import answer, describe

    asked = json.loads(line)
    return encoded(describe(asked["describe"]) if "describe" in asked else answer(job_from(line)))


def _write(descriptor: int, text: str) -> None:
    content = text.encode()
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        while content:
            content = content[os.write(descriptor, content) :]


if __name__ == "__main__":
    main()
