"""`--explain` with an optional value, which the option parser does not support."""

from __future__ import annotations

from pathlib import Path


def fill_in_explain(args: list[str]) -> list[str]:
    """Return the arguments with "all" after every --explain without a value."""
    filled: list[str] = []
    for index, argument in enumerate(args):
        filled.append(argument)
        if argument == "--":
            return filled + args[index + 1 :]
        if argument == "--explain" and not _is_word(args[index + 1 : index + 2]):
            filled.append("all")
    return filled


def _is_word(following: list[str]) -> bool:
    """Return whether an argument is the value of --explain, even if misspelled, not an option or the CONFIG."""
    from memcalc.report.tables.explanation import EXPLAINABLE
    from memcalc.spec.presets import preset_names

    if not following or following[0].startswith("-"):
        return False
    word = following[0]
    if word.lower().replace("-", "_") in EXPLAINABLE:
        return True
    is_config = word in preset_names() or "." in word or "/" in word or Path(word).exists()
    return not is_config
