"""A folder with configurations in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.spec.files import LLAMA


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of configurations that is not the one commands run in."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "config.json").write_text(json.dumps(LLAMA))
    (runs / "models").mkdir()
    (runs / "models" / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 5}))
    return runs
