"""Twenty dry runs that are cut short: the figures up to then, a verdict that claims no more, and no process left.

Each program holds what it says, leaves its processes' ids in files, and waits. Then it is killed, its time is over, or
the user interrupts `memcalc dry-run`. Needs `make .venv-null`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from memcalc.nullcuda.result import FAILED, INTERRUPTED, OUT_OF_MEMORY, TIMED_OUT

GIB = 2**30
ROOT = Path(__file__).parents[2]

BEGINS = """
import ctypes, os, signal, subprocess, sys, time, torch
def note(pid=None):
    open(f"pid-{pid or os.getpid()}", "w").close()
def hold(gib, device="cuda"):
    return torch.empty(gib << 30, dtype=torch.uint8, device=device)
def step():
    weight = torch.zeros(8, device="cuda", requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    torch.optim.SGD([weight]).step()
def wait(place=0):
    open(f"began-{place}", "w").close()
    time.sleep(600)
note()
"""


@dataclass(frozen=True)
class Program:
    """A program, and its state when it waits.

    Args:
        text: after BEGINS.
        held: bytes on its fullest GPU.
        verdict: of what it has done.
        ranks: processes that wait.
    """

    text: str
    held: int
    verdict: str
    ranks: int = 1


PROGRAMS = {
    "trained a step": Program("step()\nkept = hold(3)\nwait()", 3 * GIB, "fits"),
    "no step yet": Program("kept = hold(2)\nwait()", 2 * GIB, "unknown"),
    # With Python's lock held no handler and no thread can run; SIGTERM does not end it either.
    "in one long C call": Program(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
step()
kept = hold(4)
open("began-0", "w").close()
ctypes.PyDLL(None).sleep(600)
""",
        4 * GIB,
        "fits",
    ),
    "two ranks": Program(
        """
import torch.distributed as dist
if "RANK" not in os.environ:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    os.execv(words[0], words)
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
step()
kept = hold(2 + rank, f"cuda:{rank}")
wait(rank)
""",
        3 * GIB,
        "fits",
        ranks=2,
    ),
    "children without environment": Program(
        """
for session in (False, True):
    note(subprocess.Popen(["env", "-i", "sleep", "600"], start_new_session=session).pid)
step()
kept = hold(1)
wait()
""",
        GIB,
        "fits",
    ),
    "caught an out-of-memory error": Program(
        """
step()
try:
    hold(90)
except torch.OutOfMemoryError:
    kept = hold(5)
wait()
""",
        5 * GIB,
        "unknown",
    ),
}
WAYS = ("killed", "time-out", "Ctrl-C")
ENDINGS = {  # by way: outcomes, exit codes of `memcalc dry-run`
    "killed": (FAILED, {128 + signal.SIGKILL, 1}),  # torchrun ends with 1 where a rank was killed
    "time-out": (TIMED_OUT, {124}),
    "Ctrl-C": (INTERRUPTED, {130}),
}


def dry_run(here: Path, python: str, program: Program, way: str, timeout: int) -> tuple[int, dict[str, Any]]:
    """Run a program until it waits, cut it short, and return memcalc's exit code and document."""
    (here / "script.py").write_text(BEGINS + program.text)
    command = [sys.executable, "-m", "memcalc", "dry-run", "--gpu", "h100-80gb", "--gpus", str(program.ranks)]
    command += ["--format", "json", *(["--timeout", str(timeout)] if way == "time-out" else [])]
    with (
        (here / "out").open("w+") as out,
        subprocess.Popen(
            [*command, "--", python, "script.py"],
            cwd=here,
            stdout=out,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        ) as memcalc,
    ):
        if way in ("killed", "Ctrl-C"):
            waiting = time.monotonic()
            while len(list(here.glob("began-*"))) < program.ranks:
                assert memcalc.poll() is None
                assert time.monotonic() - waiting < 300
                time.sleep(0.05)
        if way == "killed":
            for file in here.glob("pid-*"):
                os.kill(int(file.name.partition("-")[2]), signal.SIGKILL)
        elif way == "Ctrl-C":
            memcalc.send_signal(signal.SIGINT)
        code = memcalc.wait(timeout + 300)
        out.seek(0)
        return code, json.loads(out.read())


def left(here: Path) -> list[int]:
    """Processes of the program that still live."""
    found = []
    for file in here.glob("pid-*"):
        pid = int(file.name.partition("-")[2])
        stat = Path("/proc", str(pid), "stat")
        if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            found.append(pid)
    return found


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell's background jobs ignore interrupts, and so would what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.long
@pytest.mark.parametrize(("name", "way"), list(product(PROGRAMS, WAYS)))
def test_a_dry_run_that_is_cut_short(dry_run_here: Path, null_python: str, name: str, way: str) -> None:
    """Reserved are at least the blocks that are held; allocated is as of the last report, half a second before."""
    program = PROGRAMS[name]
    for timeout in (15, 60, 240, 900):  # how long torch takes to load depends on the machine
        code, document = dry_run(dry_run_here, null_python, program, way, timeout)
        if len(list(dry_run_here.glob("began-*"))) == program.ranks:
            break

    outcome, codes = ENDINGS[way]
    assert document["outcome"] == outcome
    assert code in codes
    assert document["verdict"] == program.verdict
    assert program.held <= document["peak"]["reserved_bytes"] < program.held + GIB // 2
    assert len(document["processes"]) == program.ranks
    assert left(dry_run_here) == []


CRASHES = {
    "before the first step": ("kept = hold(2)\nraise ValueError('no')", FAILED, "unknown", 1),
    "of memory that ran out": ("step()\nkept = [hold(30) for _ in range(3)]", OUT_OF_MEMORY, "does-not-fit", 4),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CRASHES)
def test_a_program_that_crashes(dry_run_here: Path, null_python: str, name: str) -> None:
    """A child in a session of its own lives on, and is ended, too."""
    text, outcome, verdict, expected = CRASHES[name]
    child = "note(subprocess.Popen(['env', '-i', 'sleep', '600'], start_new_session=True).pid)\n"

    code, document = dry_run(dry_run_here, null_python, Program(child + text, 0, verdict), "itself", 0)

    assert (document["outcome"], document["verdict"], code) == (outcome, verdict, expected)
    assert document["peak"]["reserved_bytes"] >= 2 * GIB
    assert left(dry_run_here) == []
