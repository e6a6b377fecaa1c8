"""The program run inside the test, with what it printed and its exit code."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from memcalc.cli.app import main


class Run(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Run `memcalc` with these arguments on 80 columns, as in a log."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def execute(*arguments: str) -> Run:
        code = main(arguments)
        captured = capsys.readouterr()
        return Run(code, captured.out, captured.err)

    return execute
