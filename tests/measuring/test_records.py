"""Files of records: whole lines, whatever happened to who wrote them."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.errors import InputError, NotWritten
from memcalc.json_lines import TAIL
from memcalc.measuring.records import RECORDS


def record(number: int, size: int = 0) -> dict[str, object]:
    return {"record": 2, "number": number, "filling": "x" * size}


@given(st.integers(min_value=1, max_value=200))
def test_a_line_that_was_cut_off_is_left_out_and_then_replaced(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        RECORDS.append((record(1),), path)
        RECORDS.append((record(2),), path)
        whole = path.read_bytes()
        last = len(whole) - whole[:-1].rindex(b"\n") - 1
        path.write_bytes(whole[: len(whole) - min(cut, last)])
        kept = [1, 2] if cut == 1 else [1]  # a record that lacks its line break alone is whole

        assert [found["number"] for found in RECORDS.read(path)] == kept
        RECORDS.append((record(3),), path)
        assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [*kept, 3]


def test_half_a_line_longer_than_the_tail_that_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    RECORDS.append((record(1, 3 * TAIL),), path)
    with path.open("a") as file:
        file.write('{"record":2,"filling":"' + "x" * (2 * TAIL + 5))
    RECORDS.append((record(2),), path)

    assert [found["number"] for found in RECORDS.read(path)] == [1, 2]


def test_a_file_without_any_line_end_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"record": 2')

    assert list(RECORDS.read(path)) == []
    RECORDS.append((record(1),), path)
    assert [found["number"] for found in RECORDS.read(path)] == [1]


def test_no_file_no_records(tmp_path: Path) -> None:
    assert list(RECORDS.read(tmp_path / "none.jsonl")) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", r"records\.jsonl:2: this line is not a record of a measured run\."),
        ('{"record": 99}', r"records\.jsonl:2: a record of version 99\. Upgrade memcalc\."),
    ],
)
def test_an_invalid_record_is_reported_with_its_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    RECORDS.append((record(1),), path)
    with path.open("a") as file:
        file.write(line + "\n")

    with pytest.raises(InputError, match=message):
        list(RECORDS.read(path))


# What people have named by mistake: their config, their log, a picture, a file that another program wrote.
OTHERS = {
    "config.json": b'{"model_type": "llama", "hidden_size": 4096}',
    "pretty.json": b'{\n  "model_type": "llama"\n}\n',
    "run.yaml": b"name: tiny\nmodel:\n  num_layers: 2\n",
    "no_line_end.yaml": b"preset: gpt2",
    "train.log": b"epoch 1\nepoch 2",
    "picture.png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "zeros": bytes(1000),
    "list.json": b"[1, 2]",
    "records_then_something.jsonl": b'{"record":2,"number":1}\nmy notes on this run',
    "records_then_json.jsonl": b'{"record":2,"number":1}\n{"note": "mine"}',
    "own_records.json": b'{"record": "my own", "x": 1}',
    "records_then_own.jsonl": b'{"record":2,"number":1}\n{"record": true}',
    "half_of_own.jsonl": b'{"record":2,"number":1}\n{"record": nothing of memcalc',
    "whole_records_in_a_line.jsonl": b'{"record":2,"number":1}{"record":2,"number":2}',
    "a_record_and_half_a_one.jsonl": b'{"record":2,"number":1}{"record":2,"num',
    "a_record_and_a_note.jsonl": b'{"record":2,"number":1} of the first node',
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_that_holds_something_else_is_refused_and_stays(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(OTHERS[name])

    with pytest.raises(InputError, match=r"--record .*: (holds|ends in) something other than"):
        RECORDS.check(path)
    with pytest.raises(NotWritten):
        RECORDS.append((record(1),), path)
    assert path.read_bytes() == OTHERS[name]


def test_a_line_longer_than_any_record_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with path.open("wb") as file:
        file.write(b'{"record":2,')
        file.truncate(1 << 34)  # takes no space on the disk

    with pytest.raises(InputError, match=r"ends in a line that is longer than any record\."):
        RECORDS.check(path)
    assert path.stat().st_size == 1 << 34


def test_a_lock_that_is_kept_is_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr("memcalc.json_lines.PATIENCE", 0.1)
    path = tmp_path / "records.jsonl"
    RECORDS.append((record(1),), path)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"--record .*: is locked by another process"):
            RECORDS.check(path)
        with pytest.raises(NotWritten, match=r"could not be written: is locked by another process.*not saved"):
            RECORDS.append((record(2),), path)
    RECORDS.append((record(3),), path)
    assert [found["number"] for found in RECORDS.read(path)] == [1, 3]


def test_a_link_to_a_missing_directory(tmp_path: Path) -> None:
    link = tmp_path / "records.jsonl"
    link.symlink_to(tmp_path / "new" / "records.jsonl")
    RECORDS.check(link)
    RECORDS.append((record(1),), link)

    assert [found["number"] for found in RECORDS.read(link)] == [1]


def test_what_cannot_take_records_is_refused_before_the_run(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("x")
    for name, why in (
        (".", "is a directory, not a file"),
        ("fifo", "is a pipe, not a file"),
        ("loop", "cannot be used: Too many levels of symbolic links"),
        ("file/records.jsonl", "cannot be used: Not a directory"),
    ):
        with pytest.raises(InputError, match=why):
            RECORDS.check(tmp_path / name)
    RECORDS.check(tmp_path / "new" / "records.jsonl")
    assert not (tmp_path / "new").exists()


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system writes part of a line, then says that there is no space."""
    import errno
    import os

    path = tmp_path / "records.jsonl"
    RECORDS.append((record(1),), path)
    before = path.read_bytes()
    write, calls = os.write, 0

    def full(descriptor: int, content: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content[:7])

    monkeypatch.setattr("memcalc.json_lines.os.write", full)
    with pytest.raises(NotWritten, match=r"records\.jsonl could not be written: No space left on device"):
        RECORDS.append((record(2),), path)
    assert path.read_bytes() == before


def test_dev_full_is_named(tmp_path: Path) -> None:
    RECORDS.check(Path("/dev/full"))
    with pytest.raises(NotWritten, match="/dev/full could not be written: No space left on device"):
        RECORDS.append((record(1),), Path("/dev/full"))


def test_names_that_are_no_unicode_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    RECORDS.append(({"record": 2, "command": "memcalc measure \udcff.yaml"},), path)

    assert next(RECORDS.read(path))["command"] == "memcalc measure \udcff.yaml"


WRITES = """
import sys
from pathlib import Path
from memcalc.measuring.records import RECORDS
writer, first, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
for number in range(first, first + 400):
    RECORDS.append(({"record": 2, "writer": writer, "number": number, "filling": "x" * (number * 37 % 50_000)},), path)
    print(number, flush=True)
"""


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.long)])
def test_two_writers_that_are_killed_lose_no_record(kills: int, tmp_path: Path) -> None:
    """Every record that its writer reported as written exists once, complete, and in its writer's order."""
    import random
    import subprocess
    import sys

    chance = random.Random(22)
    path = tmp_path / "records.jsonl"
    said: dict[str, list[int]] = {"a": [], "b": []}
    for round_ in range(kills // 2):
        writers = {
            name: subprocess.Popen(
                [sys.executable, "-c", WRITES, name, str(round_ * 1_000), str(path)], stdout=subprocess.PIPE, text=True
            )
            for name in said
        }
        for name, process in writers.items():  # each has written something before it is killed
            assert process.stdout is not None
            said[name].append(int(process.stdout.readline()))
        with suppress(subprocess.TimeoutExpired):
            writers["a"].wait(chance.uniform(0, 0.2))
        for name, process in writers.items():
            process.kill()
            assert process.stdout is not None
            said[name] += [int(line) for line in process.stdout.read().splitlines(keepends=True) if line[-1:] == "\n"]
            process.wait()
            process.stdout.close()
    RECORDS.append((record(0),), path)
    found = list(RECORDS.read(path))
    for name, numbers in said.items():
        kept = [each["number"] for each in found if each.get("writer") == name]

        assert kept == sorted(set(kept))
        assert set(numbers) <= set(kept)
        # Of each round at most one more: written, and not yet said.
        assert len(kept) - len(numbers) <= kills // 2
