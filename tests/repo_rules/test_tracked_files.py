"""What the repository tracks at its top: a program that runs there may leave folders, which no commit should contain."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"benchmarks", "configs", "docs", "memcalc", "tests", "tools"}


def test_folders_at_the_top_are_known() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = {name.split("/")[0] for name in tracked.stdout.splitlines() if "/" in name}

    assert {name for name in found if not name.startswith(".")} == FOLDERS
