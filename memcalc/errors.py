"""The errors memcalc raises on purpose, and the exit code each one ends a command with.

MemcalcError            base: carries `exit_code`, caught in one place (cli/app.py)
|- DoesNotFit     1     the question was answered "no" (check, fit, recompute)
|- InputError     2     the input is wrong: file, key, value, rule, remedy
|  `- InputErrors 2     several things in it are
|- Unavailable    3     something that is needed is missing or busy: an extra, a compiler, a GPU
|  `- NotWritten  3     a result could not be written: the disk is full
`- OutOfMemory    4     a measured or dry run ran out of memory; its record is kept
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.text import LONGEST_TEXT, harmless_lines, message_part, shortened_in_the_middle

MOST_ERRORS = 20  # of one input that are told at once
_LONGEST_PLACE = 400  # characters: a path and a key


class MemcalcError(Exception):
    """Base of all errors with a message meant for the user: safe to print, whatever the values in it hold.

    Args:
        text: the message; line breaks in it are the program's own.
    """

    exit_code = 2

    def __init__(self, text: str = "") -> None:
        super().__init__(harmless_lines(shortened_in_the_middle(text, LONGEST_TEXT)))


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
        self.problem = message_part(problem)
        self.remedy = message_part(remedy)
        self.where = message_part(where, _LONGEST_PLACE)
        text = f"{self.where}: {self.problem}" if where else self.problem
        super().__init__(f"{text} {self.remedy}".rstrip())

    def located(self, where: str) -> InputError:
        """The same error, with the place put in front of a place known further in."""
        return InputError(self.problem, self.remedy, f"{where}: {self.where}" if self.where else where)


class InputErrors(InputError):
    """Several things are wrong in one input. Its own text has one message a line; the first stands for all.

    Args:
        errors: at least two.
    """

    def __init__(self, errors: Sequence[InputError]) -> None:
        self.errors = tuple(errors)
        first = self.errors[0]
        super().__init__(first.problem, first.remedy, first.where)
        self.args = ("\n".join(map(str, self.errors)),)


def raise_all(errors: Sequence[InputError]) -> None:
    """Raise what was found, together.

    Raises:
        InputError: the one that was found.
        InputErrors: the several that were found.
    """
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise InputErrors(errors[:MOST_ERRORS])


class Unavailable(MemcalcError):
    """Something that is needed is missing or busy; the message says how to get it."""

    exit_code = 3


class NotWritten(Unavailable):
    """A result could not be written to a file.

    Args:
        file: the file, as the user named it.
        reason: what the system says, e.g. "No space left on device".
        remedy: what to do, as a sentence.
    """

    def __init__(self, file: str, reason: str, remedy: str = "Free space there, or name another file.") -> None:
        named = message_part(file, _LONGEST_PLACE)
        super().__init__(f"{named} could not be written: {message_part(reason)}. {remedy}".rstrip())


class OutOfMemory(MemcalcError):
    """A measured run ran out of memory."""

    exit_code = 4


class Terminated(SystemExit):
    """A signal ended the process; open files are closed on the way out.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


# What code of the user's must not keep from ending a command; whatever else it raises, it stops with.
ENDINGS = (KeyboardInterrupt, Terminated)
