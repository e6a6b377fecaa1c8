"""Pickles that hold nothing but containers, numbers and text.

A pickle is a program: it may name any function of any module and call it. Here every name is refused, so that nothing
can be called; what then remains are None, booleans, numbers, text, bytes, lists, tuples, dictionaries and sets.
"""

from __future__ import annotations

import gzip
import io
import pickle
import zlib
from pathlib import Path
from typing import Any, NoReturn

GZIP = b"\x1f\x8b"
PIECE = 2**22  # bytes read at a time
LARGEST_FILE = 2 * 2**30  # bytes, unpacked: some 20 million events


_PADDING = bytes(2**17)  # no byte of it is an opcode; longer than the frames in which a pickle is written


class Refused(Exception):
    """The file is no pickle of plain data; the message says why."""


class CutOff(Refused):
    """The file ends in the middle."""

    def __init__(self) -> None:
        super().__init__("it ends in the middle: it was cut off while it was written or copied")


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise Refused(f"it asks for {module}.{name}; a snapshot holds only lists, dictionaries, numbers and text")

    def persistent_load(self, pid: Any) -> NoReturn:  # noqa: ARG002 - whatever it is
        raise Refused("it refers to objects outside the file")


def loads_plain(content: bytes) -> object:
    """What a pickle holds.

    Raises:
        Refused: for anything but a whole pickle of plain data; `CutOff` where only its end is missing.
    """
    try:
        found: object = _PlainUnpickler(io.BytesIO(content)).load()
    except Refused:
        raise
    except EOFError:
        raise CutOff from None
    except MemoryError:
        raise Refused("it asks for more memory than a file of its size can need") from None
    except Exception as error:  # noqa: BLE001 - broken pickles raise whatever their opcodes lead to
        if "truncated" in str(error):
            raise CutOff from None
        raise Refused(f"it is no pickle that Python can read ({error})") from None
    return found


def plain_memo(content: bytes) -> dict[int, object]:
    """All that a pickle which was cut off had begun to build, by its number in the pickle's memo.

    Raises:
        Refused: for a pickle of anything but plain data.
    """
    # The last frame is incomplete, and would not be read at all: it is filled up with what is no opcode.
    unpickler = _PlainUnpickler(io.BytesIO(content + _PADDING))
    try:
        unpickler.load()
    except Refused:
        raise
    except Exception:  # noqa: BLE001 - where it breaks off is no opcode
        return dict(unpickler.memo.copy())
    raise CutOff


def content_of(path: Path) -> bytes:
    """The bytes of a pickle, unpacked where the file is compressed with gzip, as far as it goes.

    Raises:
        Refused: when it cannot be unpacked, or is larger than any snapshot.
        OSError: when the file cannot be read.
    """
    with path.open("rb") as file:
        packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        source: io.BufferedIOBase = gzip.GzipFile(fileobj=file) if packed else file
        content = bytearray()
        try:
            while len(content) <= LARGEST_FILE and (piece := source.read1(PIECE)):
                content += piece
        except EOFError:
            pass  # the packed file was cut off: what it holds is told by its contents
        except (zlib.error, gzip.BadGzipFile) as error:
            raise Refused(f"it cannot be unpacked ({error})") from None
        except MemoryError:
            raise Refused("it is larger than the memory that is left") from None
    if len(content) > LARGEST_FILE:
        raise Refused(f"it holds more than {LARGEST_FILE // 2**30} GiB")
    return bytes(content)
