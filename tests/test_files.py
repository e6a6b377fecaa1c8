"""Files that are read: regular ones, of a bounded size, without waiting. Files that are written: whole, or as before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memcalc.errors import InputError, NotWritten
from memcalc.files import plain_json, read_text, write_text, writing


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, why in (
        ("pipe", "is a pipe, not a file"),
        (".", "is a directory, not a file"),
        ("none", "cannot be read: No such file or directory"),
        ("a\0b", "cannot be read: the name is invalid for a file"),
    ):
        with pytest.raises(InputError, match=why):
            read_text(tmp_path / name)
    with pytest.raises(InputError, match="is a device, not a file"):
        read_text("/dev/zero")


def test_sizes_and_encodings_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 101)
    with pytest.raises(InputError, match="has more than 100 bytes"):
        read_text(path, most=100)
    path.write_bytes(b"\xef\xbb\xbfa")
    assert read_text(path) == "a"
    path.write_bytes(b"a\xff")
    with pytest.raises(InputError, match="byte 1 is not UTF-8 text"):
        read_text(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", '{"a": ' + "9" * 5_000 + "}", ""])
def test_json_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^a\.json: (this is not JSON|the JSON is nested too deeply)"):
        plain_json(text, "a.json")


def write_half(path: Path) -> None:
    """Write until the disk is full."""
    with writing(path) as file:
        file.write(b"half")
        raise OSError(28, "No space left on device")


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_full_disk_is_named_and_costs_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotWritten, match="/dev/full could not be written: No space left on device"):
        write_text("/dev/full", "text")
    path = tmp_path / "report.json"
    path.write_text("before")
    with pytest.raises(NotWritten, match=r"report\.json could not be written: No space left"):
        write_half(path)
    assert path.read_text() == "before"
    assert names_in(tmp_path) == ["report.json"]


def test_files_keep_their_rights_and_links_their_targets(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    target.chmod(0o640)
    link.symlink_to(target)
    write_text(link, "after \udcff")

    assert link.is_symlink()
    assert target.read_text() == "after ?"
    assert target.stat().st_mode & 0o777 == 0o640


def test_a_pipe_without_a_reader_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device or address") as caught:
        write_text(tmp_path / "pipe", "text")
    assert caught.value.filename == str(tmp_path / "pipe")


WRITES = """
import sys, time
from memcalc.files import writing
with writing(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_left_is_removed_by_the_next_that_writes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a[1].json"
    path.write_text("before")
    with subprocess.Popen([sys.executable, "-c", WRITES, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert path.read_text() == "before"
    assert len(names_in(tmp_path)) == 2
    write_text(path, "after")
    assert names_in(tmp_path) == ["a[1].json"]
    assert path.read_text() == "after"
    assert time.time() - path.stat().st_mtime < 60
