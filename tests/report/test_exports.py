"""Files for other programs."""

import json
import pickle
from pathlib import Path

import pytest

from memcalc.allocator import history
from memcalc.allocator.pytorch.dump import snapshot
from memcalc.errors import InputError
from memcalc.events import read_events, timeline
from memcalc.events.chrome import chrome_trace
from memcalc.report.exports import write_export
from memcalc.report.tables.recorded_run import RecordedRun
from tests.report.runs import asked_for, replayed, two_steps


def test_the_suffix_decides_the_format(tmp_path: Path) -> None:
    found = history(two_steps())
    run = RecordedRun(timeline(two_steps()), found)
    for name in ("run.pickle", "run.json", "run.jsonl"):
        write_export(tmp_path / name, run, "tiny")

    with (tmp_path / "run.pickle").open("rb") as file:
        assert pickle.load(file) == snapshot(found)
    assert json.loads((tmp_path / "run.json").read_text()) == chrome_trace(run.curve, "tiny")
    assert list(read_events(tmp_path / "run.jsonl")) == two_steps()


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.txt ends in '\.txt'\. The suffix .* \.pickle, \.json, \.jsonl\."):
        write_export(tmp_path / "run.txt", RecordedRun(timeline([])), "tiny")


def test_a_snapshot_needs_an_allocator(tmp_path: Path) -> None:
    run = RecordedRun(timeline(two_steps()))
    write_export(tmp_path / "run.json", run, "tiny")

    assert json.loads((tmp_path / "run.json").read_text()) == chrome_trace(asked_for(two_steps()), "tiny")
    with pytest.raises(InputError, match=r"run\.pickle: a memory snapshot records the CUDA allocator, which this run"):
        write_export(tmp_path / "run.pickle", run, "tiny")
    assert not (tmp_path / "run.pickle").exists()


def test_the_course_is_what_the_allocator_saw() -> None:
    assert RecordedRun(timeline(two_steps()), history(two_steps())).curve == replayed(two_steps())
