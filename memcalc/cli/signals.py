"""Ending on a signal: remove temporary files, then exit with the code of the signal."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from typing import Any

from memcalc.errors import ENDINGS, Terminated

# A terminal that closes sends SIGHUP; `timeout`, `kill`, CI runners and batch systems send SIGTERM.
_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_SOON = 0.01  # seconds

_received: list[int] = []  # the signals that ended the process


def end_by_signals() -> None:
    """Make signals that end the process remove temporary files first."""
    for number in _ENDING:
        with suppress(ValueError, OSError):  # not the main thread
            if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP, and so do we then
                signal.signal(number, _terminate)
    sys.unraisablehook = _raise_again
    with suppress(ValueError):
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)


def _raise_again(ignored: Any) -> None:
    """Raise what a signal raised once more, where Python ignores it: in a callback of a weak reference, in `__del__`.

    The import system has such callbacks, so that an interrupt could end in a message and nothing else.
    """
    if not issubclass(ignored.exc_type, ENDINGS):
        sys.__unraisablehook__(ignored)
        return
    import threading

    threading.Timer(_SOON, _interrupt_main).start()  # by then the callback has returned


def _interrupt_main() -> None:
    """Interrupt the main thread, also where it waits in a system call: `_thread.interrupt_main` would wait for it."""
    import _thread
    import threading

    main = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and main is not None:
        signal.pthread_kill(main, signal.SIGINT)
    else:
        _thread.interrupt_main()


def exit_code() -> int | None:
    """Return the exit code of a process that a signal ended; None if no signal did.

    Python wraps what a signal's handler raises where a class is being made, and libraries do elsewhere.
    """
    return 128 + _received[0] if _received else None


def end_at_once() -> None:
    """Make signals end the process at once: nothing is left to remove or print."""
    for number in (signal.SIGINT, *_ENDING):
        with suppress(ValueError, OSError):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, _: object) -> None:
    _received.append(number)
    raise KeyboardInterrupt


def _terminate(number: int, _: object) -> None:
    _received.append(number)
    for each in _ENDING:  # a second one must not interrupt the removal
        signal.signal(each, signal.SIG_IGN)
    raise Terminated(number)
