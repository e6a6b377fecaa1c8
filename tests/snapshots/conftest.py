"""The command line, for tests of what it refuses."""

from tests.cli.conftest import run

__all__ = ["run"]
