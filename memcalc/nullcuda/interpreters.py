"""The Python that a command will run: the null device is built for its torch."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from memcalc.errors import InputError

PYTHON = re.compile(r"python[\d.]*")

# pip writes this if an interpreter's path is too long for a first line: '''exec' "/long/path/python" "$0" "$@"
EXEC_LINE = re.compile(r"""'''exec' "?([^"\s]+)""")


def interpreters(command: tuple[str, ...]) -> list[str]:
    """Return the interpreters that the command may run, the most likely first.

    A Python that is named by the command or by a script's first line is the only one. Else (a shell script, a launcher)
    it is the Python on PATH, or the one that runs memcalc.

    Raises:
        InputError: the command does not exist.
    """
    path = shutil.which(command[0])
    if path is None:
        remedy = (
            f"Try: python {command[0]}"
            if command[0].endswith(".py")
            else "Check the spelling, and that the program is installed."
        )
        raise InputError(f"{command[0]!r} is not an executable command.", remedy, "COMMAND")
    if PYTHON.fullmatch(Path(path).name):
        return [path]
    named = _named_in(Path(path))
    if named is not None:
        return [named]
    found = [shutil.which("python"), shutil.which("python3"), sys.executable]
    return [python for python in found if python]


def _named_in(script: Path) -> str | None:
    """Return the Python in a script's first lines; None: there is none."""
    with script.open("rb") as file:
        start = file.read(512).decode(errors="replace")
    if not start.startswith("#!"):
        return None
    first, _, second = start.partition("\n")
    wrapped = EXEC_LINE.match(second)
    words = [wrapped[1]] if wrapped else first[2:].split()
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    if not words or not PYTHON.fullmatch(Path(words[0]).name):
        return None
    return shutil.which(words[0]) or os.fspath(words[0])
