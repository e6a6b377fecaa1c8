"""Errors that memcalc raises on purpose, each with the exit code of the command.

MemcalcError            base: carries `exit_code`, caught in one place (cli/app.py)
|- DoesNotFit     1     the result is "no" (check, fit, recompute)
|- InputError     2     invalid input: file, key, value, rule, remedy
|  `- InputErrors 2     several errors in one input
|- Unavailable    3     a requirement is missing or busy: an extra, a compiler, a GPU
|  `- NotWritten  3     a result could not be written, for example because the disk is full
`- OutOfMemory    4     a measured run or a dry run ran out of memory; its record is kept
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from memcalc.text import LONGEST_TEXT, harmless_lines, message_part, shortened_in_the_middle

MOST_ERRORS = 20  # errors reported at once for one input
_LONGEST_PLACE = 400  # characters: a path and a key


class MemcalcError(Exception):
    """Base of all errors that carry a message for the user.

    The message is safe to print, regardless of the values in it.

    Args:
        text: the message; only the program itself puts line breaks into it.
    """

    exit_code = 2

    def __init__(self, text: str = "") -> None:
        super().__init__(harmless_lines(shortened_in_the_middle(text, LONGEST_TEXT)))


class DoesNotFit(MemcalcError):
    """The command ran, and the result is "no"."""

    exit_code = 1


class InputError(MemcalcError):
    """The input is invalid. The message gives the place, the value, the violated rule and the remedy.

    Args:
        problem: the value and the rule it violates, as a sentence.
        remedy: how to fix it, as a sentence.
        location: file, line and key, if known, e.g. "gpt3.yaml:12: model.num_layers".
    """

    exit_code = 2

    def __init__(self, problem: str, remedy: str = "", where: str = "") -> None:
        self.problem = message_part(problem)
        self.remedy = message_part(remedy)
        self.location = message_part(where, _LONGEST_PLACE)
        text = f"{self.location}: {self.problem}" if where else self.problem
        super().__init__(f"{text} {self.remedy}".rstrip())

    def located(self, where: str) -> InputError:
        """Return the same error, with `location` prepended to the place that is already known."""
        return InputError(self.problem, self.remedy, f"{where}: {self.location}" if self.location else where)


class InputErrors(InputError):
    """Several errors in one input. The text has one message per line; the attributes are those of the first error.

    Args:
        errors: at least two.
    """

    def __init__(self, errors: Sequence[InputError]) -> None:
        self.errors = tuple(errors)
        first = self.errors[0]
        super().__init__(first.problem, first.remedy, first.location)
        self.args = ("\n".join(map(str, self.errors)),)


def raise_all(errors: Sequence[InputError]) -> None:
    """Raise all errors as one exception, in the order of their lines; return if there are none.

    Raises:
        InputError: there is one error.
        InputErrors: there are several; the first `MOST_ERRORS` are kept.
    """
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise InputErrors(sorted(errors, key=_line)[:MOST_ERRORS])


def _line(error: InputError) -> int:
    """Return the line in the place of an error; 0 for a place without one, such as an option."""
    found = re.search(r":(\d+)(?:: |$)", error.location)
    return int(found[1]) if found else 0


class Unavailable(MemcalcError):
    """A requirement is missing or busy; the message says how to get it."""

    exit_code = 3


class NotWritten(Unavailable):
    """A result could not be written to a file.

    Args:
        file: the file, as the user named it.
        reason: the system's error text, e.g. "No space left on device".
        remedy: what to do, as a sentence.
    """

    def __init__(self, file: str, reason: str, remedy: str = "Free space there, or name another file.") -> None:
        named = message_part(file, _LONGEST_PLACE)
        super().__init__(f"{named} could not be written: {message_part(reason)}. {remedy}".rstrip())


class OutOfMemory(MemcalcError):
    """A measured run ran out of memory."""

    exit_code = 4


class Terminated(SystemExit):
    """A signal ended the process. As a SystemExit it unwinds the stack, so open files are closed.

    Args:
        number: the signal's number; the exit code is 128 + number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


# Exceptions raised in user code that still end the command. Any other exception ends only that code.
ENDINGS = (KeyboardInterrupt, Terminated)
