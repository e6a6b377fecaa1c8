"""The program `memcalc`: runs one command and turns every outcome into an exit code.

0 done - 1 answered no - 2 wrong input - 3 something needed is missing - 4 out of memory - 130 interrupted
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from memcalc.cli.quick import end_quickly, start_quickly

INTERRUPTED = 130
PIPE_CLOSED = 141  # 128 + SIGPIPE, as a program ends that leaves the signal alone


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `memcalc` with these arguments (default: those of the process) and return its exit code."""
    if arguments is not None:
        return _run(list(arguments))
    start_quickly()
    try:
        return _run(sys.argv[1:])
    finally:
        end_quickly()


def _run(arguments: list[str]) -> int:
    from memcalc.cli.messages import explain_usage, show_error
    from memcalc.cli.tree import USAGE_ERRORS, command_tree
    from memcalc.errors import MemcalcError

    _print_what_can_be_printed()
    try:
        outcome = command_tree().main(arguments, prog_name="memcalc", standalone_mode=False)
        sys.stdout.flush()
    except MemcalcError as error:
        show_error(str(error))
        return error.exit_code
    except USAGE_ERRORS as error:
        show_error(explain_usage(error))
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _leave_pipe()
    return outcome if isinstance(outcome, int) else 0


def _print_what_can_be_printed() -> None:
    """A terminal without Unicode shows formulas with question marks rather than a traceback."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _leave_pipe() -> int:
    """The reader has gone (`memcalc models | head`): nobody is left to tell."""
    import os

    # The interpreter flushes standard output once more at its end, into the closed pipe if we let it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED
