"""A log of any size as chunks of whole lines: gzip and UTF-16 (PowerShell's redirection) are undone on the way."""

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
_KEPT = 2**14  # of a chunk without any report, what the next one may need: a traceback's frames, a wrapped head

# Logs pack to a tenth or a fiftieth; deflate's own limit, for a file of one letter, is 1032.
MOST_UNPACKED = 300
SUSPECT_BYTES = 2**28  # unpacked: up to here every ratio is read

_NO_BREAK_SPACE = "\u00a0".encode()
_GZIP = b"\x1f\x8b"
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class Line(NamedTuple):
    """One line of a log."""

    number: int  # from 1
    text: str


@contextmanager
def open_log(log: str | Path) -> Iterator[tuple[str, BinaryIO]]:
    """The log's name and its bytes; "-" is standard input.

    Raises:
        InputError: it cannot be opened.
    """
    if str(log) == "-":
        yield "standard input", sys.stdin.buffer
        return
    with open_file(log, "Name the log of the run.", pipes=True) as stream:
        yield str(log), stream


class Readable(Protocol):
    """A stream of bytes, as far as it is asked."""

    def read(self, size: int, /) -> bytes:
        """The next bytes, at most so many."""


class _Told:
    """A stream that tells how much of it is read."""

    def __init__(self, stream: BinaryIO, progress: Progress) -> None:
        self._stream = stream
        self._progress = progress
        self._read = 0
        self._total: int | None = None
        with suppress(OSError):
            about = os.fstat(stream.fileno())
            self._total = about.st_size >> 20 if stat.S_ISREG(about.st_mode) else None

    def read(self, size: int, /) -> bytes:
        """The next bytes."""
        found = self._stream.read(size)
        self._read += len(found)
        self._progress("MiB of the log", self._read >> 20, self._total)
        return found


def told(stream: BinaryIO, progress: Progress) -> Readable:
    """The stream; `progress` is told how much of it is read, in MiB."""
    return stream if progress is silent else _Told(stream, progress)


class Chunk(NamedTuple):
    """Whole lines of a log."""

    number: int  # of the first one
    content: bytes
    before: bytes  # the lines before it, as far as they may be needed and were not wanted themselves


def chunks_worth_reading(stream: Readable, wanted: Callable[[bytes], bool]) -> Iterator[Chunk]:
    """The chunks that `wanted` wants, each with the last lines of the chunk before it.

    Memory is bounded by two chunks: a longer line comes in pieces.
    """
    number, kept = 1, b""
    for lines in _whole_lines(_plain(stream)):
        chunk = lines.replace(_NO_BREAK_SPACE, b" ")  # what is copied from a web page has some
        if wanted(chunk):
            yield Chunk(number, chunk, kept)
            kept = b""
        else:
            kept = chunk[-_KEPT:]
        number += chunk.count(b"\n")


def lines_of(chunk: Chunk) -> Iterator[Line]:
    """The lines of a chunk and of what was kept before it."""
    yield from _lines(chunk.before, chunk.number - chunk.before.count(b"\n"))
    yield from _lines(chunk.content, chunk.number)


def _lines(chunk: bytes, number: int) -> Iterator[Line]:
    parts = chunk.split(b"\n")
    if chunk.endswith(b"\n"):
        parts.pop()
    for offset, part in enumerate(parts):
        for piece in part.split(b"\r"):  # a progress bar writes over its own line
            if piece:
                yield Line(number + offset, piece.decode("utf-8", "replace"))


def _whole_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Chunks cut at the end of a line, as far as there is one."""
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
    """The bytes as UTF-8, unpacked, never more than a few chunks at once."""
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
    unpacker = zlib.decompressobj(wbits=31)  # 31: with gzip's header
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
                        f"it expands to more than {MOST_UNPACKED} times its size.", "Pass the original log."
                    )
                yield piece
                packed = unpacker.unconsumed_tail
                if unpacker.eof:  # a file may hold several members, one after the other
                    packed = unpacker.unused_data
                    unpacker = zlib.decompressobj(wbits=31)
    except zlib.error as error:
        raise InputError(f"it cannot be unpacked: {error}.", "Unpack it first, or name the plain log.") from None
