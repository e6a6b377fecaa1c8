"""Shared by all tests: whole screens compared with the ones kept in tests/golden."""

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="rewrite tests/golden/*.txt with what is printed now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with tests/golden/<name>.txt; `pytest --regenerate` writes that file instead."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        clean = "\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n"
        if request.config.getoption("--regenerate"):
            path.write_text(clean)
        assert clean == path.read_text(), f"{path.name} is stale: look at it after `pytest --regenerate`"

    return compare
