"""Commands that are ended at random moments, or cannot print: no traceback, no hang, nothing lost, nothing left."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fuzz.formats import CHAIN, EVENTS, ROOT, measured_records

MEMCALC = [sys.executable, "-m", "memcalc"]
SECONDS = 20.0  # that a command may take to end after a signal, or without output: the bar for a hang
MOMENTS = 12  # of every command and signal
SIGNALS = {signal.SIGINT: {130, -signal.SIGINT}, signal.SIGTERM: {143, -signal.SIGTERM}, signal.SIGKILL: {-9}}

# What keeps a stream from being written; the exit codes are the command's own, or say so.
STREAMS = (
    ">&-",
    "2>&-",
    ">&- 2>&-",
    "<&- >&- 2>&-",
    ">/dev/full",
    "2>/dev/full",
    ">/dev/full 2>&1",
    "| true",
    "2>&1 | true",
)


class Command(NamedTuple):
    """A command, and the exit codes that it has when nothing is in its way."""

    words: str
    codes: frozenset[int]


def _command(words: str, *codes: int) -> Command:
    return Command(words, frozenset(codes or (0,)))


COMMANDS = (
    _command("estimate gpt2"),
    _command("estimate gpt2 --format json"),
    _command("estimate nope", 2),
    _command("check configs --gpu h100-80gb --report json=report.json", 1),
    _command("fit gpt2 --gpu h100-80gb"),
    _command("sweep gpt2 --vary b=1..8 --vary num_layers=1..20 --output all.csv"),
    _command("fit gpt2 --gpu h100-80gb --gpus 2 --write written.yml --as axolotl"),
    _command("estimate gpt2 --gpu t4 --html report.html"),
    _command("recompute chain.yaml --budget 1200KiB"),
    _command("recompute gpt2 --gpu t4 --write planned.yaml"),
    _command("replay events.jsonl --gpu h100-80gb --picture space.html", 0, 1),
    _command("oom oom.log"),
    _command("diff gpt2 gpt2-medium --format markdown"),
    _command("models"),
    _command("gpus --format json"),
    _command("schema"),
    _command("--help"),
)
# These run torch, in this process, in others, and in others of theirs: seconds each, so that each has few moments.
TINY = "--set l=1 --set d=32 --set h=2 --set V=64 --set s=8 --set b=1 --set attention=eager"
STEP = "import torch, torch._dynamo; kept = torch.ones(9, device='cuda'); import time; time.sleep(0.5)"
BOTH = """
import subprocess, sys
try:
    for process in [subprocess.Popen([sys.executable, "step.py"]) for _ in range(2)]:
        process.wait()
except KeyboardInterrupt:
    sys.exit(130)
"""
WITH_TORCH = (
    _command(f"trace gpt2 {TINY} --record events-made.jsonl --plot timeline.html"),
    _command(f"trace gpt2 {TINY} --device null --python NULL --export chrome.json"),
    _command(f"recompute gpt2 {TINY} --gpu t4 --verify --device fake"),
    _command(f"measure gpt2 {TINY} --device cpu --record records.jsonl"),
    _command(f"measure gpt2 {TINY} --device null:h100-80gb --python NULL --trace none --record records.jsonl"),
    _command("measure --suite suite.yaml --device cpu --record records.jsonl"),
    _command("measure --compare measured.jsonl --record compared.jsonl"),
    _command("dry-run --gpu h100-80gb --record dry.json -- NULL step.py"),
    _command("dry-run --gpu h100-80gb --format json -- NULL both.py"),
    _command(f"replay gpt2 {TINY} --plot timeline.html"),
    _command(f"sweep gpt2 {TINY} --by trace --vary s=8,16 --workers 2 --cells cells.jsonl --output cells.csv"),
    _command("sweep --by dry-run --gpu h100-80gb --vary n=1,2 --workers 1 --cells cells.jsonl -- NULL step.py {n}"),
)
MOMENTS_WITH_TORCH = 2
NULL_PYTHON = Path(os.environ.get("MEMCALC_NULL_PYTHON") or ROOT / ".venv-null" / "bin" / "python")
SUITE = "{runs: [gpt2 l=1 d=32 h=2 V=64 s=8 attention=eager, gpt2 l=2 d=32 h=2 V=64 s=8 attention=eager], steps: 1}"

OUTPUTS = {"report.json", "all.csv", "planned.yaml", "space.html", "written.yml", "report.html"}
OUTPUTS_WITH_TORCH = {
    "events-made.jsonl",
    "timeline.html",
    "chrome.json",
    "records.jsonl",
    "compared.jsonl",
    "dry.json",
    "cells.jsonl",
    "cells.csv",
}
INPUTS = {"configs", "chain.yaml", "events.jsonl", "oom.log", "suite.yaml", "step.py", "both.py", "measured.jsonl"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with what the commands read, and a directory for temporary files."""
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "tmp").mkdir()
    (work / "configs").symlink_to(ROOT / "configs")
    (work / "chain.yaml").write_bytes(CHAIN)
    (work / "events.jsonl").write_bytes(EVENTS)
    (work / "oom.log").write_bytes((ROOT / "docs/examples/oom.log").read_bytes())
    (work / "suite.yaml").write_text(SUITE)
    (work / "step.py").write_text(STEP)
    (work / "both.py").write_text(BOTH)
    (work / "measured.jsonl").write_bytes(measured_records())
    return work


def environment(folder: Path) -> dict[str, str]:
    # This program, wherever the command runs, and not one that is installed.
    own = {"TMPDIR": str(folder.parent / "tmp"), "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    return os.environ | own


def words_of(command: Command) -> list[str]:
    """The command line."""
    return [*MEMCALC, *(str(NULL_PYTHON) if word == "NULL" else word for word in command.words.split())]


def live(folder: Path) -> list[str]:
    """Processes that work in a directory: what a command has started and not ended; they may take a moment."""
    until = time.monotonic() + SECONDS
    while (found := _working(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def _working(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").resolve() == folder and int(process.name) != os.getpid():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200])
    return found


def left_behind(folder: Path) -> list[str]:
    """Temporary files, and files that are not whole."""
    return [
        str(path.relative_to(folder.parent))
        for path in (*(folder.parent / "tmp").rglob("*"), *folder.iterdir())
        if path.name not in OUTPUTS | OUTPUTS_WITH_TORCH | INPUTS
    ]


def lost_records(folder: Path) -> list[str]:
    """What is wrong with the records that were kept: each line but a last one that was cut off is a whole record."""
    found = []
    for name, key in (("records.jsonl", "record"), ("compared.jsonl", "record"), ("cells.jsonl", "cell")):
        path = folder / name
        *whole, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
        try:
            found += [f"{name}: {line[:80]!r}" for line in whole if key not in json.loads(line)]
        except ValueError as error:
            found.append(f"{name}: {error}")
    return found


def without(command: Command, streams: str, folder: Path, seconds: float = 0.0) -> str | None:
    """The complaint about a command that cannot print, and takes so many seconds where it can."""
    line = f"{shlex.join(words_of(command))} {streams}"
    if "|" in streams:
        line += "; exit ${PIPESTATUS[0]}"
    try:
        done = subprocess.run(
            ["bash", "-c", line],
            capture_output=True,
            cwd=folder,
            env=environment(folder),
            timeout=SECONDS + 3 * seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{line}: no end"
    if remaining := live(folder):
        return f"{line}: still running {remaining}"
    allowed = command.codes | ({3, 141} if "full" in streams or "|" in streams else set())
    if done.returncode not in allowed:
        return f"{line}: exit code {done.returncode}"
    if b"Traceback" in done.stdout + done.stderr or b"Exception ignored" in done.stderr:
        return f"{line}: a traceback"
    return None


def ended(command: Command, number: int, seconds: float, folder: Path) -> str | None:
    """The complaint about a command that gets a signal after some time."""
    with subprocess.Popen(
        words_of(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder, env=environment(folder)
    ) as process:
        time.sleep(seconds)
        process.send_signal(number)
        try:
            _, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"{command.words}: no end {SECONDS} s after {signal.Signals(number).name}"
    place = f"{command.words}: {signal.Signals(number).name} after {seconds:.2f} s"
    if process.returncode not in SIGNALS[signal.Signals(number)] | command.codes:
        # Before memcalc's first line runs, an interrupt is Python's own to report.
        if b"memcalc/cli" not in err and process.returncode in (1, -signal.SIGINT):
            return None
        return f"{place}: exit code {process.returncode}"
    # Not those of the program of a dry run.
    if b"Traceback" in err and b"memcalc/cli" in err:
        return f"{place}: {err.decode()[-300:]}"
    return None


def run(command: Command, folder: Path) -> float:
    """The seconds that a command takes that nothing is in the way of, on this machine and beside what runs on it."""
    began = time.monotonic()
    subprocess.run(words_of(command), capture_output=True, cwd=folder, env=environment(folder), check=False)
    return time.monotonic() - began


def interrupted(commands: tuple[Command, ...], moments: int, seed: int, folder: Path) -> list[str]:
    """The complaints about commands that get each signal at random moments, and then are run once more."""
    rng = random.Random(seed)
    print(f"seed {seed}")
    found = []
    for command in commands:
        whole = run(command, folder)
        for number in SIGNALS:
            for _ in range(moments):
                found.append(ended(command, number, rng.uniform(0.3 * whole, 1.1 * whole), folder))
                found += [f"{command.words}: still running {words}" for words in live(folder)]
                found += [f"{command.words}: {problem}" for problem in lost_records(folder)]
                if number != signal.SIGKILL:
                    found += [f"{command.words}: left {name}" for name in left_behind(folder)]
        # What was killed is cleaned by the next run.
        run(command, folder)
        found += [f"{command.words}: left {name}" for name in left_behind(folder)]
    return [each for each in found if each is not None]


def test_a_command_that_cannot_print(folder: Path) -> None:
    """Every third kind of stream; the long tests have all."""
    assert [found for streams in STREAMS[::3] if (found := without(COMMANDS[0], streams, folder))] == []


def test_a_command_that_is_ended(folder: Path) -> None:
    assert interrupted(COMMANDS[5:6], 1, 1, folder) == []


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words)
def test_every_command_that_cannot_print(command: Command, folder: Path) -> None:
    assert [found for streams in STREAMS if (found := without(command, streams, folder))] == []


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words)
def test_every_command_ended_at_random_moments(command: Command, folder: Path) -> None:
    assert interrupted((command,), MOMENTS, 2, folder) == []


needs_null = pytest.mark.skipif(not NULL_PYTHON.exists(), reason="needs `make .venv-null`")


@pytest.mark.long
@needs_null
@pytest.mark.parametrize("command", WITH_TORCH, ids=lambda command: command.words[:60])
def test_commands_with_torch_that_cannot_print(command: Command, folder: Path) -> None:
    """Two types of streams each, randomly sampled in every run of the tests, which prints them."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    drawn = random.Random(seed).sample(STREAMS, 2)
    seconds = run(command, folder)
    assert [found for streams in drawn if (found := without(command, streams, folder, seconds))] == []


@pytest.mark.long
@needs_null
@pytest.mark.parametrize("command", WITH_TORCH, ids=lambda command: command.words[:60])
def test_commands_with_torch_ended_at_random_moments(command: Command, folder: Path) -> None:
    """Randomly sampled in every run of the tests, which prints how to sample the same again."""
    assert interrupted((command,), MOMENTS_WITH_TORCH, random.SystemRandom().randrange(2**32), folder) == []


@pytest.mark.long
def test_a_long_trace_shows_its_progress_and_ends_at_ctrl_c(folder: Path) -> None:
    """A model of 70 B parameters in PyTorch, on a terminal, for tens of seconds."""
    terminal, other = os.openpty()
    words = [*MEMCALC, "replay", "llama-3-70b"]
    with subprocess.Popen(words, stdout=other, stderr=other, cwd=folder, env=environment(folder)) as process:
        os.close(other)
        shown = b""
        while b"forward_1" not in shown:
            shown += os.read(terminal, 4096)
        process.send_signal(signal.SIGINT)
        until = time.monotonic() + SECONDS
        with suppress(OSError):  # of a terminal that nobody else has open
            while os.read(terminal, 4096):
                assert time.monotonic() < until
        os.close(terminal)

        assert process.wait(SECONDS) == 130
    assert left_behind(folder) == []


@pytest.mark.long
@pytest.mark.parametrize("kilobytes", [12, 24])
def test_a_disk_for_temporary_files_that_fills_up_costs_no_record(kilobytes: int, folder: Path) -> None:
    """By the limit of a file's size, which the record is below, and the events of a run are above."""
    words = f"measure gpt2 {TINY} --steps 3 --device cpu --trace none --record records.jsonl"
    line = f"ulimit -f {kilobytes}; {shlex.join([*MEMCALC, *words.split()])}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, cwd=folder, env=environment(folder), check=False)

    assert (done.returncode, done.stderr) == (0, b"")
    assert (folder / "records.jsonl").read_text().count("\n") == 1
    assert left_behind(folder) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        "check gpt2 --gpu h100-80gb --report json=FULL",
        "sweep gpt2 --vary b=1..4 --output FULL.csv",
        "replay events.jsonl --picture FULL.svg",
        "recompute gpt2 --gpu t4 --write FULL",
    ],
)
def test_a_result_that_cannot_be_kept_is_printed(words: str, folder: Path) -> None:
    """The file is on a full disk, the screen is not; exit code 3 names the file."""
    name = next(word for word in words.replace("json=", "").split() if word.startswith("FULL"))
    (folder / name).symlink_to("/dev/full")
    done = subprocess.run(
        [*MEMCALC, *words.split()], capture_output=True, text=True, cwd=folder, env=environment(folder), check=False
    )

    assert done.returncode == 3
    assert len(done.stdout) > 100
    assert done.stderr.startswith(f"error: {name} could not be written: No space left on device. ")
