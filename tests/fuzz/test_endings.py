"""Commands that are ended at random moments, or cannot print: no traceback, no hang, nothing lost, nothing left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fuzz.formats import CHAIN, EVENTS, ROOT

MEMCALC = [sys.executable, "-m", "memcalc"]
SECONDS = 20.0  # that a command may take to end once it was told to, or without output: the bar for a hang
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
OUTPUTS = {"report.json", "all.csv", "planned.yaml", "space.html"}


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
    return work


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"TMPDIR": str(folder.parent / "tmp"), "COLUMNS": "80"}


def left_behind(folder: Path) -> list[str]:
    """Temporary files, and files that are not whole."""
    return [
        str(path.relative_to(folder.parent))
        for path in (*(folder.parent / "tmp").rglob("*"), *folder.iterdir())
        if path.name not in OUTPUTS | {"configs", "chain.yaml", "events.jsonl", "oom.log"}
    ]


def without(command: Command, streams: str, folder: Path) -> str | None:
    """The complaint about a command that cannot print."""
    line = f"{' '.join(MEMCALC)} {command.words} {streams}"
    if "|" in streams:
        line += "; exit ${PIPESTATUS[0]}"
    try:
        done = subprocess.run(
            ["bash", "-c", line], capture_output=True, cwd=folder, env=environment(folder), timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{line}: no end"
    allowed = command.codes | ({3, 141} if "full" in streams or "|" in streams else set())
    if done.returncode not in allowed:
        return f"{line}: exit code {done.returncode}"
    if b"Traceback" in done.stdout + done.stderr or b"Exception ignored" in done.stderr:
        return f"{line}: a traceback"
    return None


def ended(command: Command, number: int, seconds: float, folder: Path) -> str | None:
    """The complaint about a command that gets a signal after some time."""
    words = [*MEMCALC, *command.words.split()]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder, env=environment(folder)
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
    if b"Traceback" in err and b"memcalc/" in err:
        return f"{place}: {err.decode()[-300:]}"
    return None


def interrupted(commands: tuple[Command, ...], moments: int, seed: int, folder: Path) -> list[str]:
    """The complaints about commands that get each signal at random moments, and then are run once more."""
    rng = random.Random(seed)
    found = []
    for command in commands:
        began = time.monotonic()
        subprocess.run(
            [*MEMCALC, *command.words.split()], capture_output=True, cwd=folder, env=environment(folder), check=False
        )
        whole = time.monotonic() - began
        for number in SIGNALS:
            for _ in range(moments):
                found.append(ended(command, number, rng.uniform(0.3 * whole, 1.1 * whole), folder))
                if number != signal.SIGKILL:
                    found += [f"{command.words}: left {name}" for name in left_behind(folder)]
        # What was killed is cleaned by the next run.
        subprocess.run(
            [*MEMCALC, *command.words.split()], capture_output=True, cwd=folder, env=environment(folder), check=False
        )
        found += [f"{command.words}: left {name}" for name in left_behind(folder)]
    return [each for each in found if each is not None]


def test_a_command_that_cannot_print(folder: Path) -> None:
    assert [found for streams in STREAMS if (found := without(COMMANDS[0], streams, folder))] == []


def test_a_command_that_is_ended(folder: Path) -> None:
    assert interrupted(COMMANDS[5:6], 2, 1, folder) == []


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words)
def test_every_command_that_cannot_print(command: Command, folder: Path) -> None:
    assert [found for streams in STREAMS if (found := without(command, streams, folder))] == []


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words)
def test_every_command_ended_at_random_moments(command: Command, folder: Path) -> None:
    assert interrupted((command,), MOMENTS, 2, folder) == []


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
