"""The program `memcalc`: runs one command and turns every outcome into an exit code.

0 done - 1 answered no - 2 wrong input - 3 something needed is missing - 4 out of memory - 130 interrupted
70 a bug of ours, with its traceback: Python's own code for that, 1, would say that a run does not fit
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from memcalc.cli.quick import end_quickly, start_quickly

INTERRUPTED = 130
BUG = 70  # EX_SOFTWARE of sysexits.h
PIPE_CLOSED = 141  # 128 + SIGPIPE, as a program ends that leaves the signal alone


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `memcalc` with these arguments (default: those of the process) and return its exit code."""
    if arguments is not None:
        return _run(list(arguments))
    start_quickly()
    try:
        return _run(sys.argv[1:])
    except Exception:  # noqa: BLE001 - shown in full, then given a code of its own
        import traceback

        traceback.print_exc()
        return BUG
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
        return leave_output(PIPE_CLOSED)
    except OSError as error:
        show_error(f"{error.filename or 'standard output'}: {error.strerror or error}.")
        return leave_output(2 if error.filename else 3)
    return outcome if isinstance(outcome, int) else 0


def _print_what_can_be_printed() -> None:
    """A terminal without Unicode shows formulas with question marks rather than a traceback."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def leave_output(code: int) -> int:
    """Give up standard output: its reader has gone (`memcalc models | head`) or its disk is full. Returns `code`."""
    import os

    # The interpreter flushes standard output once more at its end, where that would fail again.
    with contextlib.suppress(OSError):  # called from a program whose standard output is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
