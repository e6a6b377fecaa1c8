"""`with null_device("h100-80gb") as device:` in a user's program or test suite."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from memcalc.directories import temporary_directory
from memcalc.errors import OutOfMemory
from memcalc.nullcuda.dry_run import REPORTS, end_abandoned, read_reports
from memcalc.nullcuda.gpu_description import find_null_gpu
from memcalc.nullcuda.launcher import environment
from memcalc.nullcuda.options import BALANCED, Options
from memcalc.nullcuda.result import DONE, FAILED, OUT_OF_MEMORY, DryRun


class null_device:  # noqa: N801 -- reads as the function that it is used as, like contextlib.suppress
    """Let processes started inside the block use emulated GPUs, and report their memory afterwards.

        with memcalc.null_device("h100-80gb") as device:
            device.call(train, batch_size=8)                    # a function, in a child process
            subprocess.run([sys.executable, "train.py"])        # or any process of your own
        assert device.result.device_bytes < 70 * 2**30

    This process itself is not changed: torch loads its libraries once, when it is imported.

    Args:
        gpu: a GPU of `memcalc gpus`.
        gpus: number of GPUs.
        python: the interpreter of the processes; the device is built for its torch.
        options: see `memcalc.nullcuda.options.Options`.

    Raises:
        InputError: the GPU is unknown, or there are too many.
        Unavailable: no Linux, no CUDA build of torch, no C compiler, or no writable cache.
    """

    def __init__(
        self, gpu: str, gpus: int = 1, *, python: str | Path = sys.executable, **options: Unpack[Options]
    ) -> None:
        self.gpu = find_null_gpu(gpu)
        self.gpus = gpus
        self.python = str(python)
        self.options = options
        self.outcome = DONE
        self._result: DryRun | None = None

    def __enter__(self) -> Self:
        """Set the environment for child processes on the device."""
        self.start = time.monotonic()
        end_abandoned()
        self._closing = ExitStack()
        self.reports = self._closing.enter_context(temporary_directory(REPORTS))
        try:
            variables = environment(
                self.gpu.name, self.gpus, pythons=(self.python,), reports=self.reports, **self.options
            )
        except BaseException:
            self._closing.close()
            raise
        self.former = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the environment, and read the children's reports."""
        for name, value in self.former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._result = self._read()
        self._closing.close()

    @property
    def result(self) -> DryRun:
        """Memory of the processes that have ended so far."""
        return self._read() if self._result is None else self._result

    def call(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """Call a function in a child process, on the device.

        As in `multiprocessing`, the function is found by its name in its module; arguments and result are pickled.

        Returns:
            The function's result.

        Raises:
            OutOfMemory: it ran out of GPU memory.
            RuntimeError: it failed otherwise; its traceback is on standard error.
        """
        request, answer = self.reports / "request", self.reports / "answer"
        answer.unlink(missing_ok=True)
        with request.open("wb") as file:
            main = getattr(sys.modules["__main__"], "__file__", None)
            pickle.dump((_own_paths(), function.__module__, main, function.__qualname__), file)
            pickle.dump((arguments, named), file)
        words = [self.python, "-m", "memcalc_call", str(request), str(answer)]
        child = subprocess.run(words, check=False)  # noqa: S603 -- the caller's own interpreter and function
        succeeded, value = False, ("", "")
        if answer.exists():
            succeeded, value = pickle.loads(answer.read_bytes())  # noqa: S301 -- written by memcalc's own child
        if succeeded:
            return value
        error_type, message = value
        if error_type == "OutOfMemoryError":
            self.outcome = OUT_OF_MEMORY
            raise OutOfMemory(message)
        self.outcome = FAILED
        what = f"failed with {error_type}: {message}" if error_type else f"ended with exit code {child.returncode}"
        raise RuntimeError(f"{function.__qualname__} {what}")

    def _read(self) -> DryRun:
        processes = tuple(process for process, _ in read_reports(self.reports, self.gpu) if process.usages)
        command: Sequence[str] = (self.python,)
        seconds = time.monotonic() - self.start
        code = {DONE: 0, OUT_OF_MEMORY: 4}.get(self.outcome, 1)
        routing = self.options.get("routing", BALANCED)
        return DryRun(tuple(command), self.gpu, self.gpus, self.outcome, code, seconds, processes, routing=routing)


def _own_paths() -> list[str]:
    """Return the program's own entries of the search path, without those of this Python."""
    python = (sys.prefix, sys.base_prefix)
    return [path or os.getcwd() for path in sys.path if not path.startswith(python)]  # noqa: PTH109 -- a string
