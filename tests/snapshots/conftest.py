"""The command line, for tests of rejected snapshots."""

from tests.cli.conftest import run

__all__ = ["run"]
