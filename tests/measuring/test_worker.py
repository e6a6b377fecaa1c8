"""The process that measures: what becomes of it when a run ends badly, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from memcalc.errors import MemcalcError, OutOfMemory, Unavailable
from memcalc.measuring.client import Worker
from memcalc.measuring.job import Job
from memcalc.measuring.worker import preload
from memcalc.spec.loading import load

TINY = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 16}

# The real worker, with a run that does as the test says. It imports no torch: forking, answers and ends are its own.
PROGRAM = """
import os, sys, time, types
fake = types.ModuleType("memcalc.measuring.run_process")
def answer(job):
    {body}
fake.answer, fake.describe = answer, None
sys.modules["torch"] = sys.modules["torch._dynamo"] = types.ModuleType("torch")
import memcalc.measuring
sys.modules["memcalc.measuring.run_process"] = fake
memcalc.measuring.run_process = fake
from memcalc.measuring.worker import main
main()
"""


def worker(body: str) -> Worker:
    return Worker([sys.executable, "-c", PROGRAM.format(body=body)])


def job(asked: Worker) -> Job:
    return Job(load({"name": "tiny", "model": TINY}), 1, "cpu", "", asked.events)


def test_it_imports_what_this_process_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is started: files of the working directory that are called like modules have no say."""
    for folder, text in (("here", "raise SystemExit('the working directory')"), ("path", "raise ImportError('ours')")):
        (tmp_path / folder).mkdir()
        for name in ("torch.py", "json.py") if folder == "here" else ("torch.py",):
            (tmp_path / folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "path")
    monkeypatch.chdir(tmp_path / "here")

    with Worker() as asked, pytest.raises(Unavailable, match=r"lacks a package: ours\."):
        asked.run(job(asked))


def test_it_keeps_the_interpreters_flags() -> None:
    """-I: neither the environment nor the user's packages; the path is still reported."""
    program = "import sys; sys.path.insert(0, sys.argv[1]); from memcalc.measuring.client import own_command as own;"
    program += "print(own()[1], sys.argv[1] in own()[-1])"
    command = [sys.executable, "-I", "-c", program, str(Path(__file__).parents[2])]

    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["-I", "True"]


@pytest.mark.parametrize(("implementation", "imported"), [("huggingface", ["memcalc.step.huggingface"]), ("plain", [])])
def test_what_takes_seconds_is_imported_before_the_fork(
    implementation: str, imported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers, once for all runs; that it cannot be imported is for the run to say."""
    asked: list[str] = []

    def note(name: str) -> None:
        asked.append(name)
        raise RuntimeError("broken")

    monkeypatch.setattr("memcalc.measuring.worker.importlib.import_module", note)
    preload(Job(load("gpt2", [f"implementation={implementation}"]), 1, "cpu", "", "events").line())
    preload('{"describe": "cuda"}')

    assert asked == imported


def test_each_run_has_a_process_of_its_own() -> None:
    with worker("return {'pid': os.getpid(), 'parent': os.getppid()}") as asked:
        answers = [asked.run(job(asked)) for _ in range(3)]

    assert len({found["pid"] for found in answers}) == 3
    assert len({found["parent"] for found in answers}) == 1


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("os.kill(os.getpid(), 9)", OutOfMemory, "The run was killed, as the system does when the host's memory"),
        ("print('noise'); raise ValueError('a bug')", Unavailable, r"exit code 1: ValueError: a bug"),
        ("return {'refused': ['Unavailable', 'no GPU']}", Unavailable, "^no GPU$"),
    ],
    ids=["killed", "a traceback", "refused"],
)
def test_a_run_that_ends_badly_is_one_message_and_the_next_one_runs(
    body: str, kind: type[MemcalcError], message: str
) -> None:
    guarded = f"""
    if not os.path.exists(job.events):
        open(job.events, "w").close()
        {body}
    return {{"fine": True}}"""
    with worker(guarded.strip()) as asked:
        with pytest.raises(kind, match=message):
            asked.run(job(asked))
        assert asked.run(job(asked)) == {"fine": True}


def test_what_libraries_print_is_no_answer() -> None:
    with worker("os.write(1, b'hello'); return {'fine': True}") as asked:
        assert asked.run(job(asked)) == {"fine": True}


def test_a_process_that_cannot_start_is_unavailable() -> None:
    program = [sys.executable, "-c", "import no_such_package"]
    with Worker(program) as asked, pytest.raises(Unavailable, match="No module named 'no_such_package'"):
        asked.run(job(asked))


def alive(pid: int) -> bool:
    """Whether a process still runs: not gone, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
def test_an_interrupt_ends_the_run_at_once(tmp_path: Path) -> None:
    """As Ctrl-C does: the exception comes while the answer is awaited."""
    note = tmp_path / "pid"
    body = f"open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)

    def when_it_runs() -> None:
        while not (note.exists() and note.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGALRM)

    def measure() -> None:
        with worker(body) as asked:
            threading.Thread(target=when_it_runs, daemon=True).start()
            asked.run(job(asked))

    try:
        with pytest.raises(KeyboardInterrupt):
            measure()
    finally:
        signal.signal(signal.SIGALRM, before)
    pid = int(note.read_text())
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)

    assert not alive(pid)
    assert pid != os.getpid()
