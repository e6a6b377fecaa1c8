"""Pickles that contain only containers, numbers and text.

A pickle is a program: it may name any function of any module and call it. Here every name is rejected, so nothing can
be called. What remains are None, booleans, numbers, text, bytes, lists, tuples, dictionaries and sets.
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


_PADDING = bytes(2**17)  # contains no opcode; longer than the frames of a pickle


class UnsafePickle(Exception):
    """The file is not a pickle of plain data; the message gives the reason."""


class TruncatedFile(UnsafePickle):
    """The file is truncated."""

    def __init__(self) -> None:
        super().__init__("it is truncated: writing or copying it was interrupted")


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise UnsafePickle(
            f"it refers to {module}.{name}; a snapshot has only lists, dictionaries, numbers and strings"
        )

    def persistent_load(self, pid: Any) -> NoReturn:  # noqa: ARG002 - any object is rejected
        raise UnsafePickle("it refers to objects outside the file")


def loads_plain(content: bytes) -> object:
    """Return the content of a pickle.

    Raises:
        Refused: anything but a complete pickle of plain data; `TruncatedFile` if only its end is missing.
    """
    try:
        found: object = _PlainUnpickler(io.BytesIO(content)).load()
    except UnsafePickle:
        raise
    except EOFError:
        raise TruncatedFile from None
    except MemoryError:
        raise UnsafePickle("it requests more memory than a file of its size can need") from None
    except Exception as error:  # noqa: BLE001 - damaged pickles can raise any error
        if "truncated" in str(error):
            raise TruncatedFile from None
        raise UnsafePickle(f"it is not a pickle that Python can read ({error})") from None
    return found


def plain_memo(content: bytes) -> dict[int, object]:
    """Return all objects that a truncated pickle had begun to build, by their number in the pickle's memo.

    Raises:
        Refused: a pickle of anything but plain data.
    """
    # The last frame is incomplete and would not be read at all, so it is padded with bytes that are not opcodes.
    unpickler = _PlainUnpickler(io.BytesIO(content + _PADDING))
    try:
        unpickler.load()
    except UnsafePickle:
        raise
    except Exception:  # noqa: BLE001 - where it breaks off is no opcode
        return dict(unpickler.memo.copy())
    raise TruncatedFile


def content_of(path: Path) -> bytes:
    """Return the bytes of a pickle, decompressed with gzip if necessary, up to a truncation.

    Raises:
        Refused: the file cannot be decompressed, or is larger than any snapshot.
        OSError: the file cannot be read.
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
            pass  # truncated: the content determines what can be read
        except (zlib.error, gzip.BadGzipFile) as error:
            raise UnsafePickle(f"it cannot be unpacked ({error})") from None
        except MemoryError:
            raise UnsafePickle("it is larger than free memory") from None
    if len(content) > LARGEST_FILE:
        raise UnsafePickle(f"it holds more than {LARGEST_FILE // 2**30} GiB")
    return bytes(content)


# The parts of a file, in the order in which PyTorch writes them.
PARTS = ("segments", "device_traces", "allocator_settings", "external_annotations")
_SEGMENT = {"address", "total_size", "blocks"}


def salvaged(content: bytes) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the complete segments, entries, settings and marks before the cut, and the missing or incomplete parts.

    A pickle is a program for a small machine that returns its result at the last byte. But every object is registered
    in the machine's memo as soon as it is begun, in file order. After a truncated file, the objects in the memo are
    identified by their keys; objects that were still being filled are empty and skipped.

    Raises:
        Refused: not even one segment is complete.
    """
    memo = plain_memo(content)
    values = [memo[number] for number in sorted(memo)]
    begins = [_place(part, values) for part in PARTS]
    known = [at for at in begins if at is not None]
    if not known or known != sorted(known):
        raise UnsafePickle("it is truncated before its first complete part: writing or copying it was interrupted")
    ends = dict(zip(known, [*known[1:], len(values)], strict=True))
    of = {part: values[at + 1 : ends[at]] if at is not None else [] for part, at in zip(PARTS, begins, strict=True)}
    segments = [value for value in of["segments"] if isinstance(value, dict) and value.keys() >= _SEGMENT]
    if not segments:
        raise UnsafePickle("it is truncated before its first complete part: writing or copying it was interrupted")
    found = {
        "segments": segments,
        "device_traces": _traces(of["device_traces"][1:]),
        "allocator_settings": next((value for value in of["allocator_settings"] if isinstance(value, dict)), {}),
        "external_annotations": [v for v in of["external_annotations"] if isinstance(v, dict) and "stage" in v],
    }
    last = max(place for place, at in enumerate(begins) if at is not None)
    is_whole = PARTS[last] == "allocator_settings" and bool(found["allocator_settings"])  # filled at once
    return found, PARTS[last + is_whole :]


def _place(part: str, values: list[Any]) -> int | None:
    """Return the position of a part's name, which its contents follow."""
    for at, value in enumerate(values):
        if (
            isinstance(value, str)
            and value == part
            and all(isinstance(following, list | dict) for following in values[at + 1 : at + 2])
        ):
            return at
    return None


def _traces(values: list[Any]) -> list[list[dict[str, Any]]]:
    """Return the history of each device, up to the cut."""
    traces: list[list[dict[str, Any]]] = []
    inside: set[int] = set()  # objects that belong to an entry
    for value in values:
        if id(value) in inside:
            continue
        if isinstance(value, list):
            traces.append([])
        elif isinstance(value, dict) and "action" in value and traces:
            traces[-1].append(value)
            inside.update(id(part) for part in value.values() if isinstance(part, list | dict))
        elif value == {}:
            break  # the incomplete entry
    return traces
