"""A log of any size as chunks of whole lines; gzip and UTF-16 (PowerShell redirection) are decoded."""

from __future__ import annotations

import codecs
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from memcalc.errors import InputError
from memcalc.files import open_file
from memcalc.progress import Progress, silent

CHUNK = 2**16
_KEPT = 2**14  # bytes of an unwanted chunk that the next one may need: a traceback's frames, a wrapped head

# Logs compress to a tenth or a fiftieth; deflate's limit, for a file of one repeated byte, is 1032.
MOST_UNPACKED = 300
SUSPECT_BYTES = 2**28  # unpacked: up to this size every ratio is accepted

_NO_BREAK_SPACE = "\u00a0".encode()
_GZIP = b"\x1f\x8b"
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class LogLine(NamedTuple):
    """A line with its number, by which a reader finds it in the log."""

    number: int  # from 1
    text: str


@contextmanager
def open_log(log: str | Path) -> Iterator[tuple[str, BinaryIO]]:
    """Yield the log's name and its bytes; "-" is standard input.

    Raises:
        InputError: the log cannot be opened.
    """
    if str(log) == "-":
        yield "standard input", sys.stdin.buffer
        return
    with open_file(log, "Name the log of the run.", pipes=True) as stream:
        yield str(log), stream


class Readable(Protocol):
    """The part of a byte stream's interface that is used here."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes, at most `size`."""


class _CountingStream:
    """A stream that reports how much of it has been read."""

    def __init__(self, stream: BinaryIO, progress: Progress) -> None:
        self._stream = stream
        self._progress = progress
        self._read = 0
        self._total: int | None = None
        with suppress(OSError):
            about = os.fstat(stream.fileno())
            self._total = about.st_size >> 20 if stat.S_ISREG(about.st_mode) else None

    def read(self, size: int, /) -> bytes:
        """Return the next bytes."""
        found = self._stream.read(size)
        self._read += len(found)
        self._progress("MiB of the log", self._read >> 20, self._total)
        return found


def with_progress(stream: BinaryIO, progress: Progress) -> Readable:
    """Return the stream; `progress` is called with the MiB read."""
    return stream if progress is silent else _CountingStream(stream, progress)


class LogChunk(NamedTuple):
    """Whole lines of a log."""

    number: int  # of the first line
    content: bytes
    before: bytes  # earlier lines that may be needed, if their chunk was not wanted


def chunks_worth_reading(stream: Readable, wanted: Callable[[bytes], bool]) -> Iterator[LogChunk]:
    """Yield the wanted chunks, each with the last lines of the chunk before it.

    Memory is bounded by two chunks: a longer line is split.
    """
    number, kept = 1, b""
    for lines in _whole_lines(_plain(stream)):
        chunk = lines.replace(_NO_BREAK_SPACE, b" ")  # text copied from web pages contains no-break spaces
        if wanted(chunk):
            yield LogChunk(number, chunk, kept)
            kept = b""
        else:
            kept = chunk[-_KEPT:]
        number += chunk.count(b"\n")


def lines_of(chunk: LogChunk) -> Iterator[LogLine]:
    """Yield the lines of a chunk and of the part kept before it."""
    yield from _lines(chunk.before, chunk.number - chunk.before.count(b"\n"))
    yield from _lines(chunk.content, chunk.number)


def _lines(chunk: bytes, number: int) -> Iterator[LogLine]:
    parts = chunk.split(b"\n")
    if chunk.endswith(b"\n"):
        parts.pop()
    for offset, part in enumerate(parts):
        for piece in part.split(b"\r"):  # a progress bar overwrites its own line
            if piece:
                yield LogLine(number + offset, piece.decode("utf-8", "replace"))


def _whole_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield chunks split at the end of a line, if there is one."""
    rest = b""
    for chunk in chunks:
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield rest + chunk[:cut]
            rest = chunk[cut:]
        else:
            rest += chunk
        if len(rest) > CHUNK:
            yield rest
            rest = b""
    if rest:
        yield rest


def _plain(stream: Readable) -> Iterator[bytes]:
    """Return the bytes as UTF-8, unpacked, a few chunks at a time."""
    chunks = iter(lambda: stream.read(CHUNK), b"")
    first = next(chunks, b"")
    whole = _chain(first, chunks)
    if first.startswith(_GZIP):
        return _unpacked(whole)
    if first.startswith(_UTF16):
        return _recoded(whole)
    return whole


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    if first:
        yield first
    yield from rest


def _recoded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    for chunk in chunks:
        yield decoder.decode(chunk).encode("utf-8", "replace")


def _unpacked(chunks: Iterator[bytes]) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(wbits=31)  # 31: with a gzip header
    read = made = 0
    try:
        for chunk in chunks:
            packed = chunk
            read += len(packed)
            while packed:
                piece = unpacker.decompress(packed, CHUNK)
                made += len(piece)
                if made > SUSPECT_BYTES and made > MOST_UNPACKED * read:
                    raise InputError(
                        f"the log expands to more than {MOST_UNPACKED} times its size.", "Pass the original log."
                    )
                yield piece
                packed = unpacker.unconsumed_tail
                if unpacker.eof:  # a file may consist of several gzip members
                    packed = unpacker.unused_data
                    unpacker = zlib.decompressobj(wbits=31)
    except zlib.error as error:
        raise InputError(
            f"the log cannot be unpacked: {error}.", "Unpack the log first, and name the plain file."
        ) from None
