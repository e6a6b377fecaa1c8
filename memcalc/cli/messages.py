"""Messages on standard error: one line in a log, wrapped and colored on a terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap

import typer

from memcalc.cli.streams import exact
from memcalc.text import LONGEST_PART, harmless, harmless_lines, shortened_in_the_middle


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


# Commands that people try, and what does that.
_COMMANDS = {
    **dict.fromkeys(("explain", "formula", "formulas"), "`memcalc estimate CONFIG --explain [COMPONENT]`"),
    **dict.fromkeys(
        ("size", "memory", "calc", "calculate", "predict", "run", "train", "finetune", "vram"),
        "`memcalc estimate CONFIG`",
    ),
    **dict.fromkeys(("infer", "inference", "generate"), "`memcalc estimate CONFIG --set inference.new_tokens=N`"),
    **dict.fromkeys(("presets", "list", "catalogue", "catalog", "search"), "`memcalc models [QUERY]`"),
    **dict.fromkeys(("cards", "gpu", "devices", "hardware"), "`memcalc gpus`"),
    **dict.fromkeys(("compare", "delta"), "`memcalc diff A B`"),
    **dict.fromkeys(("plan", "checkpoint", "checkpointing"), "`memcalc recompute CONFIG --gpu GPU`"),
    **dict.fromkeys(("validate", "lint"), "`memcalc check FILES --gpu GPU`"),
    **dict.fromkeys(("optimize", "suggest", "maximize", "max-batch", "layouts"), "`memcalc fit CONFIG --gpu GPU`"),
    **dict.fromkeys(("diagnose", "debug"), "`memcalc oom LOG`"),
    **dict.fromkeys(("grid",), "`memcalc sweep CONFIG --vary FIELD=VALUES`"),
    **dict.fromkeys(("dryrun", "simulate"), "`memcalc dry-run --gpu GPU -- COMMAND`"),
    **dict.fromkeys(("help", "usage"), "`memcalc --help`"),
}


def _meant(error: Exception, text: str) -> str:
    """Return the correction of a field that was given as an option, argument or command; "" if none is known."""
    option = getattr(error, "option_name", None)
    if isinstance(option, str) and option.startswith("--") and type(error).__name__ == "NoSuchOption":
        return _field_set(option.removeprefix("--").replace("-", "_"), "VALUE")
    command = re.search(r"No such command '([\w-]{1,30})'", text)
    if command is not None:
        return f"Try {_COMMANDS[command[1]]}." if command[1] in _COMMANDS else ""
    assignment = re.search(r"unexpected extra arguments? ?\(([\w.]{1,60})=(\S{1,60}?)[) ]", text)
    assignment = assignment or re.search(r"unexpected extra argument\(s\) \(([\w.]{1,60})=(\S{1,60}?)[) ]", text)
    return _field_set(assignment[1], assignment[2]) if assignment is not None else ""


def _field_set(name: str, value: str) -> str:
    from memcalc.spec.fields import find_field  # only on the way to a message
    from memcalc.spec.words import advice_for, field_of, is_foreign_name

    if name in ("config", "query", "search") or "preset" in (name, field_of(name)):
        return "Write the value as the argument, without an option."
    if find_field(name) is not None or is_foreign_name(name):
        return f"Fields are set with --set: --set {name}={value}."
    return advice_for(name) or ""


# Pydantic's rules, which Typer passes on, as sentences after "Invalid value for '--steps':".
_PYDANTIC = (
    (r"Input should be a valid integer\b[^.]*", "not a whole number; write digits only"),
    (r"Input should be a valid number\b[^.]*", "not a number"),
    (r"Input should be (greater|less) than or equal to (\S+)", r"the value must be \2 or \1"),
    (r"Input should be (greater|less) than (\S+)", r"the value must be \1 than \2"),
)


def explain_usage(error: Exception) -> str:
    """Return a usage error in one line, with the remedy."""
    text = " ".join(harmless_lines(str(getattr(error, "format_message", error.__str__)())).split())
    text = shortened_in_the_middle(text, LONGEST_PART)
    text = text.replace("Value error, ", "")  # Pydantic's words, by way of Typer
    for pydantic, words in _PYDANTIC:
        text = re.sub(pydantic, words, text)
    about = getattr(getattr(error, "param", None), "help", None)
    if about and type(error).__name__ == "MissingParameter":
        first = about[0].lower() if about[1:2] in " abcdefghijklmnopqrstuvwxyz" else about[0]  # GPU stays in capitals
        text = f"{text.rstrip('.')}: {first}{about[1:]}"
    context = getattr(error, "ctx", None)
    meant = _meant(error, text)
    if meant:
        return f"{text.partition(' (Possible')[0].partition(' Did you mean')[0].rstrip('.')}. {meant}"
    if text and text[-1] not in ".?!":  # Pydantic and Click end some sentences with nothing
        text += "."
    return f"{text} Try `{context.command_path} --help`." if context is not None else text
