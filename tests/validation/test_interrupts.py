"""A suite that is killed, or interrupted, at random moments, and started again: every record once, whole, none lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

STUB = str(Path(__file__).with_name("stub_suite.py"))
RUNS = 24


def suite_of(folder: Path, runs: Sequence[str]) -> Path:
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump({"runs": list(runs), "steps": 1}))
    return path


def lines(records: Path) -> list[dict[str, object]]:
    """Every whole line, each of which must be a record."""
    text = records.read_text() if records.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def interrupted(command: Sequence[str], number: int, seconds: float) -> int:
    """Start it, send it a signal after some time, and wait for its end."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True) as run:
        time.sleep(seconds)
        os.kill(run.pid, number)
        return run.wait(60)


def finished(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def go_through(times: int, seed: int, folder: Path) -> None:
    """Interrupt one suite until it is done, then the next one, as often as asked."""
    chance = random.Random(seed)
    runs = [f"gpt2 s={16 * length}" for length in range(1, RUNS + 1)]
    suite = suite_of(folder, runs)
    records = folder / "records-0.jsonl"
    started = time.monotonic()
    finished([sys.executable, STUB, str(suite), str(records)])
    whole = time.monotonic() - started
    assert len(lines(records)) == RUNS
    for number in range(1, times + 1):
        records = folder / f"records-{number // 4}-again.jsonl"  # each is interrupted a few times
        before = lines(records)
        command = [sys.executable, STUB, str(suite), str(records)]
        code = interrupted(command, chance.choice((signal.SIGKILL, signal.SIGINT)), chance.uniform(0, whole))
        after = lines(records)
        assert code != 0 or len(after) == RUNS
        assert after[: len(before)] == before
        if number % 4 == 3 or number == times:
            assert finished(command).split() == [str(RUNS), str(RUNS - len(after))]
            found = [json.dumps(record["spec"], sort_keys=True) for record in lines(records)]
            assert len(found) == len(set(found)) == RUNS


def test_killed_and_gone_on_with(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, [f"gpt2 s={16 * length}" for length in range(1, 9)])
    records = tmp_path / "records.jsonl"
    command = [sys.executable, STUB, str(suite), str(records)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as run:
        while len(lines(records)) < 3:
            assert run.poll() is None, "it ended by itself"
            time.sleep(0.005)
        run.kill()
    before = lines(records)

    assert 3 <= len(before) < 8
    assert finished(command).split() == ["8", str(8 - len(before))]
    assert lines(records)[: len(before)] == before
    assert len({json.dumps(record["spec"], sort_keys=True) for record in lines(records)}) == 8


@pytest.mark.long
def test_a_single_run_that_is_interrupted_leaves_no_record(tmp_path: Path) -> None:
    """A run of minutes, in the midst of it: exit code 130, one line, no file, no process."""
    record = tmp_path / "record.jsonl"
    command = [sys.executable, "-m", "memcalc", "measure", "gpt2", "--device", "cpu", "--steps", "1000"]
    command += ["--set", "s=256", "--trace", "none", "--record", str(record)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        time.sleep(10)
        assert run.poll() is None
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)

    assert (run.returncode, out) == (130, "")
    assert len(err.splitlines()) <= 1
    assert not record.exists()
    assert len(children) == 1
    assert not Path(f"/proc/{children[0]}").exists()


@pytest.mark.long
def test_interrupted_fifty_times(tmp_path: Path) -> None:
    go_through(50, 20, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seconds", [7, 11])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_real_runs_on_the_cpu(number: int, seconds: float, tmp_path: Path) -> None:
    """Four moments: importing torch takes some seconds, each run about one."""
    sizes = "l=1 d=32 h=2 V=64 recipe=pure attention=eager"
    suite = suite_of(tmp_path, [f"gpt2 {sizes} s={length}" for length in (8, 16, 24, 32)])
    records = tmp_path / "records.jsonl"
    command = [sys.executable, "-m", "memcalc", "measure", "--suite", str(suite), "--device", "cpu"]
    command += ["--record", str(records), "--format", "json"]
    assert interrupted(command, number, seconds) in (-signal.SIGKILL, 130, 0)
    before = lines(records)
    document = json.loads(finished(command))

    assert (document["runs"], document["measured_now"]) == (4, 4 - len(before))
    assert lines(records)[: len(before)] == before
    assert len({json.dumps(record["spec"], sort_keys=True) for record in lines(records)}) == len(lines(records)) == 4
