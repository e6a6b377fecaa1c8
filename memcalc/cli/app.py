"""The program `memcalc`: runs one command and turns every outcome into an exit code.

0 done - 1 answered no - 2 wrong input - 3 something needed is missing, or a result could not be written
4 out of memory - 130 interrupted - 141 the reader of the output closed it - 143 terminated
70 a bug of ours, with its traceback: Python's own code for that, 1, would say that a run does not fit
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence

from memcalc.startup import end_quickly, start_quickly

INTERRUPTED = 130
BUG = 70  # EX_SOFTWARE of sysexits.h
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `memcalc` with these arguments (default: those of the process) and return its exit code."""
    if arguments is not None:
        from memcalc.cli.streams import guarded_streams

        with guarded_streams():
            return _run(list(arguments))
    start_quickly()
    try:
        return _run_program()
    except KeyboardInterrupt:  # between two statements that would have caught it
        return INTERRUPTED
    finally:
        end_quickly()


def _run_program() -> int:
    from memcalc.cli.signals import end_at_once, end_by_signals, exit_code
    from memcalc.cli.streams import guarded_streams, open_closed_streams

    open_closed_streams()
    end_by_signals()
    try:
        with guarded_streams():
            try:
                return _run(sys.argv[1:])
            except Exception:  # noqa: BLE001 - shown in full, then given a separate exit code
                code = exit_code()
                if code is not None:  # what a signal raised, in other words
                    return code
                import traceback

                traceback.print_exc()
                return BUG
    finally:
        end_at_once()


def _run(arguments: list[str]) -> int:
    """Run a command, and see that everything it printed has left the process."""
    from memcalc.cli.messages import show_error
    from memcalc.cli.streams import ReaderGone, StreamFailed, flush_or_leave

    try:
        try:
            return _outcome(arguments)
        finally:
            flush_or_leave()
    except ReaderGone as error:
        return error.exit_code
    except StreamFailed as error:
        show_error(str(error))
        return error.exit_code


def _outcome(arguments: list[str]) -> int:
    from memcalc.cli.messages import explain_usage, show_error
    from memcalc.cli.signals import exit_code
    from memcalc.cli.streams import ReaderGone, StreamFailed
    from memcalc.cli.tree import USAGE_ERRORS, command_tree
    from memcalc.errors import InputError, InputErrors, MemcalcError, NotWritten, Unavailable

    try:
        outcome = command_tree().main(arguments, prog_name="memcalc", standalone_mode=False)
    except (StreamFailed, ReaderGone):
        raise
    except MemcalcError as error:
        for each in error.errors if isinstance(error, InputErrors) else (error,):
            show_error(str(each))
        return error.exit_code
    except USAGE_ERRORS as error:
        show_error(explain_usage(error))
        return 2
    except KeyboardInterrupt:
        return exit_code() or INTERRUPTED
    except MemoryError:
        show_error("not enough host memory. Reduce the search or the file, or free memory.")
        return Unavailable.exit_code
    except ValueError as error:
        if "integer string conversion" not in str(error):  # Python's own limit of 4,300 digits
            raise
        show_error("a number has thousands of digits. Use a realistic size, count or time.")
        return InputError.exit_code
    except OSError as error:
        if error.errno in FULL:
            show_error(str(NotWritten(str(error.filename or "a temporary file"), error.strerror or str(error))))
            return NotWritten.exit_code
        show_error(str(InputError(f"{error.strerror or error}.", where=str(error.filename or "memcalc"))))
        return 2
    return outcome if isinstance(outcome, int) else 0
