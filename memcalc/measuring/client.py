"""Client of `memcalc.measuring.worker`: starts the process, sends jobs, and cleans up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Self

from memcalc.directories import compiler_cache, temporary_directory
from memcalc.errors import InputError, MemcalcError, OutOfMemory, Unavailable
from memcalc.measuring.job import Job, encoded
from memcalc.measuring.measurement import MeasuredDevice

# For another Python, which finds memcalc by PYTHONPATH; -P keeps the working directory off the path.
WORKER = ("-P", "-m", "memcalc.measuring.worker")
KINDS: dict[str, type[MemcalcError]] = {
    "InputError": InputError,
    "Unavailable": Unavailable,
    "NotWritten": Unavailable,  # its message is complete already
}


def own_command() -> tuple[str, ...]:
    """Return the command of a worker under this Python that imports the same packages as this process."""
    path = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100 -- "" is the working directory
    program = f"import sys; sys.path[:] = {path!r}; from memcalc.measuring.worker import main; main()"
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001 -- as multiprocessing
    return (sys.executable, *flags, "-c", program)


class Worker:
    """A process that measures. On entry it has a directory for events; on exit the process and its children are ended.

    Args:
        command: a program with the protocol of `memcalc.measuring.worker`; None: that module under this Python.
        variables: additions to the environment.
    """

    def __init__(self, command: Sequence[str] | None = None, variables: Mapping[str, str] | None = None) -> None:
        self.command = tuple(command or own_command())
        self.variables = dict(variables or {})
        self._process: subprocess.Popen[str] | None = None
        self._closing = ExitStack()
        self._folder = self._closing.enter_context(temporary_directory("memcalc-measure-"))
        self._errors = self._folder / "stderr"

    @property
    def events(self) -> str:
        """File with the events of the last run."""
        return str(self._folder / "events.jsonl")

    def run(self, job: Job) -> dict[str, Any]:
        """Return the figures of one run, made in a separate process.

        Raises:
            InputError: the step cannot run the spec.
            Unavailable: a requirement is missing or busy.
            OutOfMemory: the process was killed, as the system does when host memory runs out.
        """
        return self._answer(job.line())

    def describe(self, device: str | None) -> tuple[MeasuredDevice, dict[str, str]]:
        """Return a device and its software versions, as the records of runs on it have them.

        Raises:
            InputError: there is no such type of device.
            Unavailable: there is no such device.
        """
        found = self._answer(encoded({"describe": device}))
        return MeasuredDevice(**found["device"]), found["versions"]

    def _answer(self, line: str) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(line)
            process.stdin.flush()
        found = self._receive(process)
        if "refused" in found:
            error_type, message = found["refused"]
            raise KINDS.get(error_type, MemcalcError)(message)
        if "ended" in found:
            raise self._death(found["ended"])
        return found

    def _start(self) -> subprocess.Popen[str]:
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(  # noqa: S603 -- this program, or one that the caller names
                self.command,
                env=os.environ | compiler_cache(self._folder) | self.variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C reaches this process only, which handles it
            )
        found = self._receive(self._process)
        if "refused" in found:
            raise Unavailable(found["refused"][1])
        return self._process

    def _receive(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.endswith("\n"):
            self._process = None
            raise self._death(_left(process))
        found: dict[str, Any] = json.loads(line)
        return found

    def _death(self, code: int) -> MemcalcError:
        if code == -signal.SIGKILL:
            return OutOfMemory("The run was killed, as the system does when the host's memory runs out.")
        lines = [line for line in self._errors.read_text(errors="replace").splitlines() if line.strip()]
        return Unavailable(
            f"the measured run ended with exit code {code}: {lines[-1].strip() if lines else 'no message'}\n"
            f"It was run by {self.command[0]}, which needs torch, pydantic and pyyaml (huggingface: transformers)."
        )

    def __enter__(self) -> Self:
        """Return the worker; its process starts with the first job."""
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """End the process, immediately after an error."""
        process, self._process = self._process, None
        try:
            if process is not None:
                if error is not None:
                    _kill(process)
                _left(process)
        except BaseException:  # a signal during the wait
            if process is not None:
                _kill(process)
                process.wait()
            raise
        finally:
            self._closing.close()


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _left(process: subprocess.Popen[str]) -> int:
    """Close the pipes of a process, and return its exit code."""
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()
    return process.wait()
