"""Cells in local processes, a limited number at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from memcalc.cells.cell import CellResult, Request
from memcalc.cells.child import UNAVAILABLE
from memcalc.directories import temporary_directory
from memcalc.errors import Unavailable

CHILD = "memcalc.cells.child"  # module that each process runs
KIND = "memcalc-cells-"  # prefix of the directories of requests and answers
PATIENCE = 5.0  # seconds for a process to end before it is killed
PAUSE = 0.05  # seconds between two polls of the processes
LAST_OUTPUT = 1 << 16  # bytes of a failed run's output that are searched for its last line
LAST_WORDS = 300  # characters of a failed run's last line that become its reason

PACKAGE = Path(__file__).parents[2]


class CellProcess:
    """The process that runs a cell.

    Args:
        request: request of the cell.
        folder: directory for its files; it must exist as long as the process.
        number: prefix of the files' names.
    """

    def __init__(self, request: Request, folder: Path, number: int = 0) -> None:
        files = [folder / f"{number}.{kind}" for kind in ("request", "answer", "output")]
        self._request, self._answer, self._output = files
        self._request.write_text(json.dumps(request))
        words = [sys.executable, "-P", "-m", CHILD, str(self._request), str(self._answer)]
        # The child imports this process's memcalc: on a Dask worker it may be on the path of this process only.
        path = os.pathsep.join(filter(None, (str(PACKAGE), os.environ.get("PYTHONPATH"))))
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(  # noqa: S603 -- our own module
                words,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,
            )

    def end(self) -> None:
        """End the process, if it still runs, and every process that it started."""
        with suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()  # see child.end_with_parent
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:  # it is in a call that holds the GIL
            self.process.kill()
            self.process.wait()

    def answer(self) -> CellResult:
        """Return the answer of a process that has ended.

        Raises:
            Unavailable: a requirement of every cell is missing.
        """
        code = self.process.wait()
        self.end()
        try:
            found: dict[str, Any] = json.loads(self._answer.read_bytes())
        except (OSError, ValueError):
            return self._without_answer(code)
        if UNAVAILABLE in found:
            raise Unavailable(found[UNAVAILABLE])
        answer = CellResult(**found)
        if answer.outcome == "failed" and not answer.verdict:
            return CellResult("failed", seconds=answer.seconds, reason=self._last_line() or answer.reason)
        return answer

    def _without_answer(self, code: int) -> CellResult:
        if code < 0:
            name = signal.Signals(-code).name
            return CellResult("lost", reason=f"the process that ran the cell was ended by {name}")
        return CellResult("failed", reason=self._last_line() or f"exit code {code}")

    def _last_line(self) -> str:
        with self._output.open("rb") as file:
            file.seek(max(0, self._output.stat().st_size - LAST_OUTPUT))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:LAST_WORDS] if lines else ""


def run_request(request: Request) -> CellResult:
    """Run one cell and wait for it.

    Raises:
        Unavailable: a requirement of every cell is missing.
    """
    with temporary_directory(KIND) as folder:
        run = CellProcess(request, folder)
        try:
            return run.answer()
        finally:
            run.end()


def run_here(requests: Sequence[Request], workers: int) -> Iterator[tuple[int, CellResult]]:
    """Run cells; yield the index and the answer of each as it ends.

    Args:
        requests: requests of the cells.
        workers: number of processes at a time.

    Raises:
        Unavailable: a requirement of every cell is missing.
    """
    waiting = deque(enumerate(requests))
    running: dict[int, CellProcess] = {}
    with temporary_directory(KIND) as folder:
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    number, request = waiting.popleft()
                    running[number] = CellProcess(request, folder, number)
                ended = [number for number, run in running.items() if run.process.poll() is not None]
                for number in ended:
                    yield number, running.pop(number).answer()
                if not ended:
                    time.sleep(PAUSE)
        finally:
            for run in running.values():
                run.end()
