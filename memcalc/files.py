"""Files from anywhere, and files that results are written to: one way to open each of them.

What is read is a regular file of a size that such a file can have: pipes and devices could be waited for without end.
What is written is written whole, or said not to be, under the file's own name.
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

# Bytes of a configuration, and of other files of words: settings, suites, scripts. Real ones have a few thousand.
MOST_CONFIG_BYTES = 4_000_000
# Bytes of the JSON of an earlier check: some 700 for each configuration.
MOST_REPORT_BYTES = 100_000_000

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_NO_NEW_FILES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)
_PART = ".part"  # how the name of a file ends that is not whole yet


def open_file(path: str | Path, remedy: str = "Check the path.", *, pipes: bool = False) -> BinaryIO:
    """Open a file for reading, without waiting for anybody to write to it.

    Args:
        path: the file.
        remedy: what to do instead, for the message.
        pipes: whether a pipe or a terminal will do, such as a shell's `<(command)`.

    Raises:
        InputError: there is no such file, it cannot be read, or it is not a regular file.
    """
    try:
        # A pipe nobody writes to would be waited for when it is opened.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:  # ValueError: a null character
        reason = getattr(error, "strerror", None) or "the name is invalid for a file"
        raise InputError(f"cannot be read: {reason}.", remedy, os.fspath(path)) from None
    mode = os.fstat(descriptor).st_mode
    streams = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)
    if not stat.S_ISREG(mode) and not (pipes and streams):
        os.close(descriptor)
        raise InputError(f"is {kind_of(mode)}, not a file.", remedy, os.fspath(path))
    if streams:
        os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


def is_file(path: str | Path) -> bool:
    """Whether there is a regular file of this name, which may be one that no system can look up."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # longer than the system allows, or with a null character
        return False


def kind_of(mode: int) -> str:
    """Return what something other than a regular file is, from its mode: "a directory", "a pipe"."""
    return next((name for test, name in _KINDS if test(mode)), "something else")


def read_bytes(path: str | Path, most: int = MOST_CONFIG_BYTES, remedy: str = "Check the path.") -> bytes:
    """Return the bytes of a file.

    Args:
        path: the file.
        most: bytes it may have.
        remedy: what to do instead, for the message.

    Raises:
        InputError: it cannot be read, is not a regular file, or is larger.
    """
    with open_file(path, remedy) as file:
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}.", remedy, os.fspath(path)) from None
    if len(content) > most:
        raise InputError(f"has more than {most:,} bytes, the most of such a file.", remedy, os.fspath(path))
    return content


def read_text(path: str | Path, most: int = MOST_CONFIG_BYTES, remedy: str = "Check the path.") -> str:
    """Return the text of a file in UTF-8; raises as `read_bytes`, and for other encodings."""
    return decoded(read_bytes(path, most, remedy), os.fspath(path))


def decoded(content: bytes, label: str) -> str:
    """Return bytes as text.

    Raises:
        InputError: they are not UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"byte {error.start} is not UTF-8 text.", "Save the file as text in UTF-8.", label) from None


def plain_json(text: str, label: str, remedy: str = "Check commas, quotes and brackets there.") -> Any:
    """Return what JSON holds.

    Raises:
        InputError: it is not JSON, or nests deeper than any file of ours.
    """
    import json

    try:
        return json.loads(text)
    except RecursionError:
        raise InputError("the JSON is nested too deeply.", remedy, label) from None
    except ValueError as error:
        raise InputError(f"this is not JSON: {error}.", remedy, label) from None


def write_text(path: str | Path, text: str) -> None:
    """Write a whole text file; what was in it stays if that fails.

    Raises:
        NotWritten: the disk is full or broken.
        OSError: with the file's name, where it cannot be opened for writing.
    """
    with writing(path) as file:
        # File names may hold bytes that are not UTF-8.
        file.write(text.encode("utf-8", "replace"))


@contextmanager
def writing(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file to be written whole.

    It gets its name when it is complete, so that the former one is not lost to a full disk or a kill. Devices, and
    files in directories that take no new ones, are written in place.

    Raises:
        NotWritten: the disk is full or broken.
        OSError: with the file's name, where it cannot be opened for writing.
    """
    target = Path(os.path.realpath(path))
    with naming(path):
        part = None if target.exists() and not target.is_file() else _part(target)
        if part is None:
            # A pipe nobody reads would be waited for when it is opened.
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
    """Inside, a write that fails is reported under this file's name: the system's own error does not have it.

    Raises:
        NotWritten: the disk is full or broken.
        OSError: with the file's name.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise NotWritten(os.fspath(path), error.strerror or str(error)) from None
        error.filename = os.fspath(path)
        raise


def _part(target: Path) -> tuple[int, Path] | None:
    """Open a new file beside the target; None where the directory takes none but the target can be written.

    What a killed process left there under such a name is removed.
    """
    for old in target.parent.glob(f".{_escaped(target.name)}.*{_PART}"):
        with suppress(OSError, ValueError):
            if not _is_alive(int(old.name.rsplit(".", 2)[1])):
                old.unlink()
    name = target.with_name(f".{target.name}.{os.getpid()}{_PART}")
    try:
        if target.exists() and not os.access(target, os.W_OK):
            return None  # opening it says why
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
