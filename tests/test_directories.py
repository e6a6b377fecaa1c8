"""Temporary directories go with their process, or with the next one."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memcalc.directories import (
    COMPILER_CACHE,
    LOCK,
    compiler_cache,
    stale_directories,
    temporary_compiler_cache,
    temporary_directory,
)
from memcalc.nullcuda.dry_run import REPORTS

KIND = "memcalc-test-"
PACKAGE = Path(__file__).parents[1] / "memcalc"
KINDS = {
    "memcalc-cells-",
    "memcalc-export-",
    "memcalc-compiled-",
    "memcalc-dry-run-",
    "memcalc-measure-",
    "memcalc-null-",
    "memcalc-rank-",
    "memcalc-trace-",
    ".building-",
}
HOLDS = f"""
import sys, time
from pathlib import Path
from memcalc.directories import temporary_directory
with temporary_directory({KIND!r}, Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    time.sleep(60)
"""


def test_a_directory_is_gone_at_the_end_whatever_happened(tmp_path: Path) -> None:
    with temporary_directory(KIND, tmp_path) as folder:
        (folder / "file").touch()
        assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(KeyboardInterrupt), temporary_directory(KIND, tmp_path):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_directories_of_killed_processes_are_removed_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        (left / "file").touch()
        assert stale_directories(KIND, tmp_path) == []
        with temporary_directory(KIND, tmp_path):
            assert left.is_dir()
        process.send_signal(signal.SIGKILL)
    assert stale_directories(KIND, tmp_path) == [left]
    with temporary_directory(KIND, tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_others_files_are_left_alone(tmp_path: Path) -> None:
    """A file of the name, a link to somebody's directory, and one that is being made: none is an abandoned one."""
    (tmp_path / f"{KIND}file").touch()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / LOCK).touch()
    (tmp_path / f"{KIND}link").symlink_to(tmp_path / "precious")
    (tmp_path / f"{KIND}young").mkdir()
    old = tmp_path / f"{KIND}old"
    old.mkdir()
    os.utime(old, (time.time() - 3600,) * 2)

    assert stale_directories(KIND, tmp_path) == [old]


def test_the_compiler_writes_into_a_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMPILER_CACHE, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with temporary_compiler_cache():
        folder = Path(os.environ[COMPILER_CACHE])
        folder.mkdir()
        assert folder.parent.parent == tmp_path
    assert COMPILER_CACHE not in os.environ
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_the_user_names_for_the_compiler_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMPILER_CACHE, str(tmp_path / "own"))
    (tmp_path / "own").mkdir()
    with temporary_compiler_cache():
        assert os.environ[COMPILER_CACHE] == str(tmp_path / "own")
    assert compiler_cache(tmp_path) == {}
    assert os.environ[COMPILER_CACHE] == str(tmp_path / "own")
    assert (tmp_path / "own").is_dir()


def test_every_temporary_directory_is_of_a_kind_that_is_cleaned() -> None:
    """No module but `memcalc.directories` asks the system for one, and the kinds are these."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if path.name != "folders.py":
            assert "mkdtemp" not in text
            assert "TemporaryDirectory" not in text
        if "temporary_directory" not in text:
            continue  # nothing of it to parse
        tree = ast.parse(text)
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        if "temporary_directory(REPORTS)" in text and "REPORTS" not in constants:
            constants["REPORTS"] = REPORTS
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "temporary_directory":
                kind = node.args[0]
                found.add(str(kind.value if isinstance(kind, ast.Constant) else constants[ast.unparse(kind)]))

    assert found == KINDS


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_next_directory_of_a_kind_removes_what_killed_processes_left(kind: str, tmp_path: Path) -> None:
    """Whole directories, those that have no lock yet, and of this kind alone: another one's is its own to clean."""
    begun, held = tmp_path / f"{kind}begun", tmp_path / f"{kind}held"
    others = {tmp_path / f"{each}other" for each in KINDS - {kind}}
    for folder in (begun, held, *others):
        (folder / "inside").mkdir(parents=True)
        (folder / "inside" / "file").write_text("left")
    (held / LOCK).touch()
    os.utime(begun, (time.time() - 3600,) * 2)
    with temporary_directory(kind, tmp_path) as folder:
        assert set(tmp_path.iterdir()) == {folder, *others}
    assert set(tmp_path.iterdir()) == others
