"""The errors memcalc raises on purpose, and the exit code each one ends a command with.

MemcalcError            base: carries `exit_code`, caught in one place (cli/app.py)
|- DoesNotFit     1     the question was answered "no" (check, fit, recompute)
|- InputError     2     the input is wrong: file, key, value, rule, remedy
|- Unavailable    3     something that is needed is missing or busy: an extra, a compiler, a GPU
`- OutOfMemory    4     a measured or dry run ran out of memory; its record is kept
"""

from __future__ import annotations


class MemcalcError(Exception):
    """Base of all errors with a message meant for the user."""

    exit_code = 2


class DoesNotFit(MemcalcError):
    """The question was answered, and the answer is no."""

    exit_code = 1


class InputError(MemcalcError):
    """The input is wrong. The message names where, the value, the rule it breaks and the way out.

    Args:
        problem: the value and the rule it breaks, as a sentence.
        remedy: what would fix it, as a sentence.
        where: file, line and key, as far as they are known, e.g. "gpt3.yaml:12: model.num_layers".
    """

    exit_code = 2

    def __init__(self, problem: str, remedy: str = "", where: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        self.where = where
        text = f"{where}: {problem}" if where else problem
        super().__init__(f"{text} {remedy}".rstrip())

    def located(self, where: str) -> InputError:
        """The same error, with the place put in front of a place known further in."""
        return InputError(self.problem, self.remedy, f"{where}: {self.where}" if self.where else where)


class Unavailable(MemcalcError):
    """Something that is needed is missing or busy; the message says how to get it."""

    exit_code = 3


class OutOfMemory(MemcalcError):
    """A measured run ran out of memory."""

    exit_code = 4
