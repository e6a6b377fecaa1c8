"""No config, however wrong, gets more than one clear message, and none takes long."""

import io
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType

import pytest

from memcalc.cli.app import main
from memcalc.errors import MOST_ERRORS
from tests.fuzz.mutate import mutate

SECONDS_ALLOWED = 2.0


class NoAnswer(BaseException):
    """A command computes for too long. No Exception: memcalc turns some of these into messages."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt what computes longer, so that one endless config fails rather than hangs; others may need the cores."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise NoAnswer(f"no answer after {seconds} s")

    previous = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def invoke(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command line, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()


def judge(code: int, out: str, err: str) -> str | None:
    """What is wrong with an answer, if anything."""
    if code not in (0, 2):
        return f"exit code {code}"
    if "Traceback" in out + err:
        return "a traceback"
    if code == 2 and not err.strip():
        return "refused without a message"
    if code == 2 and (any(len(line) > 3_000 for line in err.splitlines()) or err.count("\n") > MOST_ERRORS):
        return f"a message of {len(err)} characters"
    return None


def run(seed: int, samples: int, tmp_path: Path) -> list[str]:
    """The complaints about a number of configs; prints how many a second were judged."""
    config = tmp_path / "config.yaml"
    codes: Counter[int] = Counter()
    complaints = []
    slowest = 0.0
    start = time.process_time()
    for index in range(samples):
        name = f"{seed}:{index}"  # mutate(random.Random(name)) makes this config again
        config.write_bytes(mutate(random.Random(name)))
        begin = time.process_time()
        try:
            with time_limit(5 * SECONDS_ALLOWED):
                code, out, err = invoke(["estimate", str(config), "--format", "json"])
            complaint = judge(code, out, err)
            codes[code] += 1
        except (Exception, NoAnswer) as error:  # noqa: BLE001 -- whatever escapes is the finding
            complaint = f"{type(error).__name__}: {str(error)[:200]}"
        elapsed = time.process_time() - begin
        slowest = max(slowest, elapsed)
        if elapsed > SECONDS_ALLOWED:
            complaint = complaint or f"took {elapsed:.1f} s"
        if complaint:
            complaints.append(f"{name}: {complaint}")
    per_second = samples / (time.process_time() - start)
    print(f"\n{samples} configs, {per_second:.0f} a second, slowest {slowest:.2f} s, exit codes {dict(codes)}")
    return complaints


def test_some_configs(tmp_path: Path) -> None:
    assert run(1, 30, tmp_path) == []


@pytest.mark.long
def test_twenty_thousand_configs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        complaints = run(2, 20_000, tmp_path)

    assert complaints == []


def test_the_fuzzer_reaches_configs_that_are_right_and_wrong(tmp_path: Path) -> None:
    """A fuzzer with every config rejected at the first line tests nothing."""
    rng = random.Random(3)
    config = tmp_path / "config.yaml"
    codes: Counter[int] = Counter()
    for _ in range(60):
        config.write_bytes(mutate(rng))
        codes[invoke(["estimate", str(config), "--format", "json"])[0]] += 1

    assert min(codes[0], codes[2]) >= 10
