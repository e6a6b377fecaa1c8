"""Files of records: whole lines, whatever happened to who wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.errors import InputError
from memcalc.measuring.records import TAIL, append, read


def record(number: int, size: int = 0) -> dict[str, object]:
    return {"record": 2, "number": number, "filling": "x" * size}


@given(st.integers(min_value=1, max_value=200))
def test_a_line_that_was_cut_off_is_left_out_and_then_replaced(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        append(record(1), path)
        append(record(2), path)
        whole = path.read_bytes()
        last = len(whole) - whole[:-1].rindex(b"\n") - 1
        path.write_bytes(whole[: len(whole) - min(cut, last)])

        assert [found["number"] for found in read(path)] == [1]
        append(record(3), path)
        assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [1, 3]


def test_half_a_line_longer_than_the_tail_that_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append(record(1, 3 * TAIL), path)
    with path.open("a") as file:
        file.write("x" * (2 * TAIL + 5))
    append(record(2), path)

    assert [found["number"] for found in read(path)] == [1, 2]


def test_a_file_without_any_line_end_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"record": 2')

    assert list(read(path)) == []
    append(record(1), path)
    assert [found["number"] for found in read(path)] == [1]


def test_no_file_no_records(tmp_path: Path) -> None:
    assert list(read(tmp_path / "none.jsonl")) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", r"records\.jsonl:2: this line is no record of a measured run\."),
        ('{"record": 99}', r"records\.jsonl:2: a record of version 99\. Upgrade memcalc\."),
    ],
)
def test_what_is_no_record_is_told_with_its_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append(record(1), path)
    with path.open("a") as file:
        file.write(line + "\n")

    with pytest.raises(InputError, match=message):
        list(read(path))
