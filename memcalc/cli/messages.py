"""Messages on standard error: one line in a log, wrapped and colored on a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap

import typer

from memcalc.cli.streams import exact
from memcalc.text import LONGEST_TEXT, harmless, harmless_lines, shortened_in_the_middle


def show_error(text: str) -> None:
    """Print "error: ..."; colors and line breaks only on a terminal."""
    message = f"error: {harmless_lines(text)}"
    if not sys.stderr.isatty():
        sys.stderr.write(f"{message}\n")  # one line: a log is searched by line
        return
    width = max(40, shutil.get_terminal_size().columns)
    lines = [
        textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in message.splitlines()
    ]
    wrapped = "\n".join(lines)
    if "NO_COLOR" not in os.environ:
        wrapped = wrapped.replace("error:", typer.style("error:", fg="red", bold=True), 1)
    exact(sys.stderr).write(f"{wrapped}\n")


def show_warning(text: str) -> None:
    """Print "warning: ..." as one line."""
    sys.stderr.write(f"warning: {harmless(text)}\n")


def explain_usage(error: Exception) -> str:
    """Return a usage error in one line, with the remedy."""
    text = " ".join(harmless_lines(str(getattr(error, "format_message", error.__str__)())).split())
    text = shortened_in_the_middle(text, LONGEST_TEXT)
    text = text.replace("Value error, ", "")  # Pydantic's words, by way of Typer
    about = getattr(getattr(error, "param", None), "help", None)
    if about and type(error).__name__ == "MissingParameter":
        text = f"{text} It is {about[0].lower()}{about[1:]}"
    context = getattr(error, "ctx", None)
    if text and text[-1].isalnum():  # Pydantic ends its sentences with nothing
        text += "."
    return f"{text} Try `{context.command_path} --help`." if context is not None else text
