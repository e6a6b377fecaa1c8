"""Guarded standard output and error: harmless text only, and they may be closed.

Every character that memcalc prints goes through here: control characters and commands of GitHub Actions are written
out (see `memcalc.text`). What is already safe in its own format (JSON, annotations, colors drawn by Rich) is written to
`exact`.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from memcalc.errors import MemcalcError, NotWritten
from memcalc.text import without_commands

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by file descriptor


class StreamFailed(NotWritten):
    """Standard output cannot be written: its disk is full."""


class ReaderGone(MemcalcError):
    """The reader of standard output closed it, as in `memcalc models | head`."""

    exit_code = 141  # 128 + SIGPIPE, as a program ends that leaves the signal alone


class Output:
    """A text stream of the process, for text from anywhere.

    Args:
        stream: the stream itself.
        name: what messages call it.
        quiet: whether a failed write is ignored, as for messages on a closed stream.
        guard: whether control characters are written out.
    """

    def __init__(self, stream: TextIO, name: str, *, quiet: bool = False, guard: bool = True) -> None:
        self._stream = stream
        self._name = name
        self._quiet = quiet
        self._guard = guard

    @property
    def exact(self) -> Output:
        """The same stream for text that is safe already."""
        return Output(self._stream, self._name, quiet=self._quiet, guard=False)

    @property
    def rich_proxied_file(self) -> Output:
        """The stream that Rich writes to, so that its escape sequences reach the terminal."""
        return self.exact

    def write(self, text: str) -> int:
        """Write text.

        Raises:
            StreamFailed: the disk is full.
            ReaderGone: the reader closed it.
        """
        if not isinstance(text, str):
            raise TypeError(type(text).__name__)
        with self._named():
            self._stream.write(without_commands(text) if self._guard else text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered; raises as `write`."""
        with self._named():
            self._stream.flush()

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            if not self._quiet:
                raise ReaderGone from None
        except OSError as error:
            if not self._quiet:
                raise StreamFailed(self._name, error.strerror or str(error), "") from None

    def __getattr__(self, name: str) -> Any:
        """Everything else is the stream's own."""
        return getattr(self._stream, name)


class _CompleteWriter(io.RawIOBase):
    """A file descriptor that repeats partial writes until everything is written.

    With PYTHONUNBUFFERED, Python's own streams write once and drop the rest, without a word. One that must not be
    waited for, as a parent may have made a pipe that both write to, is waited for.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        left = memoryview(content).cast("B")
        size = len(left)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                import select

                select.select((), (self._descriptor,), ())
        return size


def _whole(stream: TextIO) -> TextIO:
    """Return the stream with complete writes if it is a file of the process; buffering is unchanged."""
    buffer = getattr(stream, "buffer", None)
    file = getattr(buffer, "raw", buffer)
    if not isinstance(file, io.FileIO) or not isinstance(stream, io.TextIOWrapper):
        return stream
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_CompleteWriter(file.fileno())),
        encoding=stream.encoding,
        errors="replace",  # a terminal without Unicode shows formulas with question marks rather than a traceback
        line_buffering=stream.line_buffering or file is buffer,
        write_through=file is buffer,
    )


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Inside, standard output and standard error are guarded."""
    before = sys.stdout, sys.stderr
    for stream in before:
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    out, err = map(_whole, before)
    sys.stdout = cast("TextIO", Output(out, "standard output"))
    sys.stderr = cast("TextIO", Output(err, "standard error", quiet=True))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def exact(stream: TextIO) -> TextIO:
    """Return the stream for text that is safe already: the guarded one's own, else the stream as it is."""
    return cast("TextIO", getattr(stream, "exact", stream))


def open_closed_streams() -> None:
    """Give a process that was started with closed streams (`>&-`) the null device in their place.

    Otherwise the next file that is opened gets the number of standard output, and what is printed would go into it.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is not None:
            continue
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor != number and not _is_open(number):
            os.dup2(descriptor, number)
            os.close(descriptor)
            descriptor = number
        setattr(sys, name, open(descriptor, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 - a descriptor, kept open


def flush_or_leave() -> None:
    """Flush the buffer; give up if the reader closed it or the disk is full.

    The interpreter flushes both once more at its end, and would then change the exit code.

    Raises:
        StreamFailed: the disk is full.
        ReaderGone: the reader of standard output closed it.
    """
    for stream in (sys.stderr, sys.stdout):
        try:
            exact(stream).flush()
            if stream is sys.stderr:
                getattr(stream, "_stream", stream).flush()  # a quiet stream says nothing of its failures
        except (OSError, StreamFailed, ReaderGone):
            with suppress(OSError, ValueError):  # of a stream that is not a file
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if stream is sys.stdout:
                raise


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
