"""A project with configs, and the command `memcalc` as a job would find it."""

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "project"
LARGE = "preset: llama-3-70b\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the example project."""
    folder = tmp_path / "project"
    shutil.copytree(EXAMPLE, folder)
    return folder


@pytest.fixture
def path_with_memcalc(tmp_path: Path) -> str:
    """A PATH on which `memcalc` is this checkout, and `pip` installs nothing."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, line in (
        ("memcalc", f'PYTHONPATH="{ROOT}" exec "{sys.executable}" -m memcalc "$@"'),
        ("pip", "exit 0"),
    ):
        (binaries / name).write_text(f"#!/bin/sh\n{line}\n")
        (binaries / name).chmod(0o755)
    return f"{binaries}:/usr/local/bin:/usr/bin:/bin"
