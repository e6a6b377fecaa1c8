"""Measured runs with unwritable records: they are still shown, with the right file's name."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from memcalc.cli.app import main
from memcalc.errors import InputError, NotWritten
from memcalc.measuring.client import Worker
from memcalc.measuring.measure import RecordNotWritten, measure
from memcalc.spec.loading import load
from memcalc.validation.suite import load_suite, run_suite
from tests.validation.stub_suite import WORKER

RUN = ["measure", "gpt2", "--device", "cpu", "--trace", "none"]


@contextmanager
def stub(*_: object) -> Iterator[tuple[Worker, str]]:
    """A worker that answers at once what a run on a CPU could have."""
    with Worker([sys.executable, "-c", WORKER]) as worker:
        yield worker, "cpu"


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memcalc.validation.single_run.worker_for", stub)
    monkeypatch.setattr("memcalc.validation.workers.worker_for", stub)


@pytest.mark.usefixtures("stubbed")
def test_a_run_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code = main([*RUN, "--record", "/dev/full", "--format", "json"])
    out, err = capsys.readouterr()

    assert code == 3
    assert '"peak_allocated_bytes": 64' in out
    assert err.startswith("error: /dev/full could not be written: No space left on device. The result is printed")


@pytest.mark.usefixtures("stubbed")
def test_a_picture_that_cannot_be_written_costs_neither_the_screen_nor_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plot.html").symlink_to("/dev/full")
    record = tmp_path / "records.jsonl"
    code = main([*RUN, "--record", str(record), "--plot", str(tmp_path / "plot.html")])
    out, err = capsys.readouterr()

    assert code == 3
    assert "gpt2" in out
    assert err.startswith(f"error: {tmp_path}/plot.html could not be written: No space left on device.")
    assert record.read_text().count("\n") == 1


def test_a_full_disk_for_temporary_files_costs_no_figures(tmp_path: Path) -> None:
    """The events, which the figures by component are made of, come another way."""
    from memcalc.measuring import run_process
    from memcalc.measuring.job import Job, encoded
    from memcalc.measuring.measure import measured

    spec = load("gpt2", "l=1 d=32 h=2 V=64 s=8 recipe=fp32 dtype=fp32 attention=eager dropout=0".split())
    jobs = [Job(spec, 1, "cpu", "", str(tmp_path / name)) for name in ("events.jsonl", "full.jsonl")]
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    answers = [json.loads(encoded(run_process.answer(job))) for job in jobs]
    ledgers = [measured(job, found, "").result.ledger for job, found in zip(jobs, answers, strict=True)]

    assert ["events" in found for found in answers] == [False, True]
    assert ledgers[0].totals == ledgers[1].totals
    assert ledgers[0].components("backward_1") == ledgers[1].components("backward_1")


def test_a_full_disk_before_the_run_is_no_wrong_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = Path.mkdir

    def full(self: Path, *given: Any, **named: Any) -> None:
        if self.name.startswith("memcalc-measure-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/memcalc-measure-x")
        make(self, *given, **named)

    monkeypatch.setattr(Path, "mkdir", full)
    code = main(RUN)

    assert code == 3
    assert capsys.readouterr().err.startswith("error: /tmp/memcalc-measure-x could not be written: No space left on")


def test_a_machine_without_memory_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def large(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("memcalc.sweeping.vary_option.parse_axes", large)
    code = main(["sweep", "gpt2", "--vary", "b=1..4"])

    assert code == 3
    assert capsys.readouterr().err.startswith("error: not enough host memory.")


def test_the_api_hands_over_what_was_measured() -> None:
    with stub() as (worker, device), pytest.raises(RecordNotWritten, match="/dev/full could not be written") as caught:
        measure(load("gpt2"), device, record="/dev/full", worker=worker)

    assert caught.value.measurement.phases[0].peak_allocated_bytes == 64
    assert caught.value.exit_code == 3


def test_nothing_runs_for_a_file_that_holds_something_else(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("preset: gpt2\n")
    with stub() as (worker, device), pytest.raises(InputError, match="holds something other than records"):
        measure(load(config), device, record=config, worker=worker)

    assert worker._process is None
    assert config.read_text() == "preset: gpt2\n"


def test_a_suite_stops_and_tells_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full after the second run: both are reported, the third is not started, and the file is whole."""
    suite, records = tmp_path / "suite.yaml", tmp_path / "records.jsonl"
    suite.write_text("{runs: [gpt2 s=16, gpt2 s=32, gpt2 s=48], steps: 1}")
    write, lines = os.write, 0

    def full(descriptor: int, content: bytes) -> int:
        nonlocal lines
        lines += content.startswith(b'{"record":')
        if lines > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content)

    monkeypatch.setattr("memcalc.json_lines.os.write", full)
    with stub() as (worker, device):
        outcome = run_suite(load_suite(suite), worker, device, records)

    assert isinstance(outcome.unkept, NotWritten)
    assert (len(outcome.records), outcome.fresh) == (2, 2)
    assert records.read_text().count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records.jsonl", "suite.yaml"]
