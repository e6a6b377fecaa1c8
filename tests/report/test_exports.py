"""Files for other programs."""

import json
import pickle
from pathlib import Path

import pytest

from memcalc.allocator import history
from memcalc.allocator.pytorch.dump import snapshot
from memcalc.errors import InputError
from memcalc.events import read_events
from memcalc.events.chrome import chrome_trace
from memcalc.report.exports import course_of, write_export
from tests.report.runs import replayed, two_steps


def test_the_suffix_decides_the_format(tmp_path: Path) -> None:
    found = history(two_steps())
    for name in ("run.pickle", "run.json", "run.jsonl"):
        write_export(tmp_path / name, found, "tiny")

    with (tmp_path / "run.pickle").open("rb") as file:
        assert pickle.load(file) == snapshot(found)
    assert json.loads((tmp_path / "run.json").read_text()) == chrome_trace(course_of(found), "tiny")
    assert list(read_events(tmp_path / "run.jsonl")) == two_steps()


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.txt ends in '\.txt'\. The suffix .* \.pickle, \.json, \.jsonl\."):
        write_export(tmp_path / "run.txt", history([]), "tiny")


def test_the_course_is_what_the_allocator_saw() -> None:
    assert course_of(history(two_steps())) == replayed(two_steps())
