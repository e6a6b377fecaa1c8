"""A log of any size as chunks of whole lines: gzip and UTF-16 (PowerShell's redirection) are undone on the way."""

from __future__ import annotations

import codecs
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from memcalc.errors import InputError

CHUNK = 2**20
_KEPT = 2**14  # of a chunk without any report, what the next one may need: a traceback's frames, a wrapped head

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
    try:
        stream = Path(log).open("rb")  # noqa: SIM115 -- closed below; what goes wrong meanwhile is another matter
    except (OSError, ValueError) as error:  # ValueError: a null character
        reason = getattr(error, "strerror", None) or "no such file"
        raise InputError(f"it cannot be read: {reason}.", "Name the log of the run.", str(log)[:200]) from None
    with stream:
        yield str(log), stream


def lines_worth_reading(stream: BinaryIO, wanted: Callable[[bytes], bool]) -> Iterator[Line]:
    """The lines of all chunks that `wanted` wants, each with the last lines of the chunk before it.

    Memory is bounded by two chunks: a longer line comes in pieces.
    """
    number = 1
    kept, kept_number = b"", 1
    for chunk in _whole_lines(_plain(stream)):
        following = number + chunk.count(b"\n")
        if wanted(chunk):
            yield from _lines(kept, kept_number)
            yield from _lines(chunk, number)
            kept, kept_number = b"", following
        else:
            kept = chunk[-_KEPT:]
            kept_number = following - kept.count(b"\n")
        number = following


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


def _plain(stream: BinaryIO) -> Iterator[bytes]:
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
    try:
        for chunk in chunks:
            packed = chunk
            while packed:
                yield unpacker.decompress(packed, CHUNK)
                packed = unpacker.unconsumed_tail
                if unpacker.eof:  # a file may hold several members, one after the other
                    packed = unpacker.unused_data
                    unpacker = zlib.decompressobj(wbits=31)
    except zlib.error as error:
        raise InputError(f"it cannot be unpacked: {error}.", "Unpack it first, or name the plain log.") from None
