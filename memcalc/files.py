"""Opening of files for reading and writing, in one place for the whole program.

Only regular files of a plausible size are read: a pipe or a device could block forever. A file is written completely
under its own name, or an error is raised.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from memcalc.errors import InputError, NotWritten
from memcalc.text import json_safe

# Most bytes of a config, and of other text files: settings, suites, scripts. Real files have a few thousand.
MOST_CONFIG_BYTES = 4_000_000
# Most bytes of the JSON of an earlier check: about 700 per configuration.
MOST_REPORT_BYTES = 100_000_000

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_NO_NEW_FILES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)
_PART = ".part"  # suffix of an incomplete file


def open_file(path: str | Path, remedy: str = "Check the path.", *, pipes: bool = False) -> BinaryIO:
    """Open a regular file for reading, without blocking on a pipe that has no writer.

    Args:
        path: the file.
        remedy: what to do instead, for the message.
        pipes: also accept a pipe or a terminal, such as a shell's `<(command)`.

    Raises:
        InputError: the file does not exist, cannot be read, or is not a regular file.
    """
    try:
        # Without O_NONBLOCK, opening a pipe that has no writer would block.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:  # ValueError: a null character
        reason = getattr(error, "strerror", None) or "the name is invalid for a file"
        raise InputError(f"the file cannot be read: {reason}.", remedy, os.fspath(path)) from None
    mode = os.fstat(descriptor).st_mode
    streams = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)
    if not stat.S_ISREG(mode) and not (pipes and streams):
        os.close(descriptor)
        raise InputError(f"this is {kind_of(mode)}, not a file.", remedy, os.fspath(path))
    if streams:
        os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


def is_file(path: str | Path) -> bool:
    """Return whether the path is a regular file; False if the system cannot look up the name."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # longer than the system allows, or with a null character
        return False


def kind_of(mode: int) -> str:
    """Return the type of something other than a regular file, from its mode: "a directory", "a pipe"."""
    return next((name for test, name in _KINDS if test(mode)), "something else")


def read_bytes(path: str | Path, most: int = MOST_CONFIG_BYTES, remedy: str = "Check the path.") -> bytes:
    """Return the content of a file.

    Args:
        path: the file.
        most: the largest accepted size in bytes.
        remedy: what to do instead, for the message.

    Raises:
        InputError: the file cannot be read, is not a regular file, or is larger than `most`.
    """
    with open_file(path, remedy) as file:
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise InputError(f"the file cannot be read: {error.strerror}.", remedy, os.fspath(path)) from None
    if len(content) > most:
        raise InputError(f"the file has more than {most:,} bytes, the limit for its type.", remedy, os.fspath(path))
    return content


def read_text(path: str | Path, most: int = MOST_CONFIG_BYTES, remedy: str = "Check the path.") -> str:
    """Return the text of a UTF-8 file.

    Raises:
        InputError: as `read_bytes`; or the content is not UTF-8.
    """
    return decoded(read_bytes(path, most, remedy), os.fspath(path))


def decoded(content: bytes, label: str) -> str:
    """Return bytes decoded as UTF-8, without a byte order mark.

    Raises:
        InputError: the bytes are not UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"byte {error.start} is not UTF-8 text.", "Save the file as text in UTF-8.", label) from None


def plain_json(text: str, label: str, remedy: str = "Check commas, quotes and brackets there.") -> Any:
    """Return the parsed JSON value.

    Raises:
        InputError: the text is not JSON, or is nested too deeply for the parser.
    """
    import json

    try:
        return json.loads(text)
    except RecursionError:
        raise InputError("the JSON is nested too deeply.", remedy, label) from None
    except ValueError as error:
        raise InputError(f"this is not JSON: {error}.", remedy, label) from None


def write_text(path: str | Path, text: str) -> None:
    """Write a complete text file. If writing fails, the previous content stays.

    Raises:
        NotWritten: the disk is full or faulty.
        OSError: the file cannot be opened for writing; the error carries its name.
    """
    with writing(path) as file:
        # File names in the text may contain bytes that are not UTF-8.
        file.write(text.encode("utf-8", "replace"))


def write_json(path: str | Path, document: Any) -> None:
    """Write a document as a JSON file of one line; raises as `write_text`."""
    import json  # most commands write none

    write_text(path, json_safe(json.dumps(document, ensure_ascii=False)) + "\n")


@contextmanager
def writing(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file that is to be written completely.

    The data goes to a temporary file, which is renamed when it is complete. A full disk or a kill therefore leaves the
    previous content. Devices, and files in directories that accept no new files, are written in place.

    Raises:
        NotWritten: the disk is full or faulty.
        OSError: the file cannot be opened for writing; the error carries its name.
    """
    target = Path(os.path.realpath(path))
    with naming(path):
        part = None if target.exists() and not target.is_file() else _part(target)
        if part is None:
            # Without O_NONBLOCK, opening a pipe that has no reader would block.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
            descriptor = os.open(target, flags, 0o666)
            os.set_blocking(descriptor, True)
            with os.fdopen(descriptor, "wb") as file:
                yield file
            return
        descriptor, name = part
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(descriptor)
            _keep_mode(target, name)
            name.replace(target)
        except BaseException:
            with suppress(OSError):
                name.unlink()
            raise


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Report failed writes inside the context under this file's name, which the system's own error lacks.

    Raises:
        NotWritten: the disk is full or faulty.
        OSError: any other error, with the file's name.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise NotWritten(os.fspath(path), error.strerror or str(error)) from None
        error.filename = os.fspath(path)
        raise


def _part(target: Path) -> tuple[int, Path] | None:
    """Open a new temporary file next to the target; None if the directory accepts none but the target can be written.

    Temporary files of processes that were killed are removed first.
    """
    for old in target.parent.glob(f".{_escaped(target.name)}.*{_PART}"):
        with suppress(OSError, ValueError):
            if not _is_alive(int(old.name.rsplit(".", 2)[1])):
                old.unlink()
    name = target.with_name(f".{target.name}.{os.getpid()}{_PART}")
    try:
        if target.exists() and not os.access(target, os.W_OK):
            return None  # opening the target reports the reason
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666), name
    except OSError as error:
        if error.errno in _NO_NEW_FILES:
            return None
        raise


def _keep_mode(target: Path, part: Path) -> None:
    with suppress(OSError):
        part.chmod(stat.S_IMODE(target.stat().st_mode))


def _escaped(name: str) -> str:
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in name)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
