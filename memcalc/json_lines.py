"""JSON Lines files with one record per run. Records are appended completely and never changed.

A process that is killed while writing leaves an incomplete last line. Readers skip it, and the next writer removes
it, because its run did not finish. Nothing else is ever removed: a complete line without a line break stays, and a
file with other content is rejected.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from memcalc.errors import InputError, NotWritten
from memcalc.files import kind_of, open_file

TAIL = 1 << 16  # bytes read at a time to find the last line break; lines may be longer
LONGEST_LINE = 1 << 26  # bytes; the largest records have about 10^5
PATIENCE = 20.0  # seconds to wait for another writer, which needs milliseconds


class JsonLines(NamedTuple):
    """A kind of JSON Lines file."""

    key: str  # first key of every line; its value is the version of the line's format
    version: int  # the newest version
    one: str  # what a line is, for messages: "record of a measured run"
    several: str  # the plural, for messages: "records"
    option: str  # the option that names such a file: "--record"
    writer: str  # the command that writes such a file: "measure"

    def append(self, values: Iterable[dict[str, Any]], path: Path) -> None:
        """Append lines in one write. When this returns, they are on the disk.

        Runs that share a file wait for each other, so their lines do not mix.

        Raises:
            NotWritten: the disk is full, or the file now has other content. The file is left as it was.
        """
        lines = (json.dumps(value, separators=(",", ":"), ensure_ascii=False) + "\n" for value in values)
        content = "".join(lines).encode("utf-8", "backslashreplace")  # for lone surrogates, which JSON allows
        remedy = f"The result is printed, but not saved. Free space, or name another {self.option}."
        try:
            path.resolve().parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise NotWritten(str(path), error.strerror or str(error), remedy) from None
        try:
            with _locked(descriptor):
                self._write(descriptor, content)
        except InputError as error:
            raise NotWritten(str(path), error.problem.rstrip("."), remedy) from None
        except OSError as error:
            raise NotWritten(str(path), error.strerror or str(error), remedy) from None
        finally:
            os.close(descriptor)

    def check(self, path: Path) -> None:
        """Check that lines can be appended to a file, before anything is run.

        Raises:
            InputError: the file has other content, or cannot be written.
        """
        remedy, place = f"Name a file that `{self.writer}` wrote, or a new one.", f"{self.option} {path}"
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            parent = next(folder for folder in path.resolve().parents if folder.exists())
            if not parent.is_dir() or not os.access(parent, os.W_OK):
                raise InputError(f"no file can be made in {parent}.", remedy, place) from None
            return
        except OSError as error:
            raise InputError(f"the file cannot be used: {error.strerror}.", remedy, place) from None
        except ValueError:  # a null character in the name
            raise InputError("the file cannot be used: the name is invalid for a file.", remedy, place) from None
        if not stat.S_ISREG(mode) and not stat.S_ISCHR(mode):  # /dev/null is accepted; it keeps nothing
            raise InputError(f"this is {kind_of(mode)}, not a file.", remedy, place)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise InputError(f"the file cannot be written: {error.strerror}.", remedy, place) from None
        try:
            if stat.S_ISREG(mode):
                with _locked(descriptor):
                    self._tail(descriptor)
        except InputError as error:
            raise InputError(error.problem, remedy, place) from None
        finally:
            os.close(descriptor)

    def read(self, path: Path) -> Iterator[dict[str, Any]]:
        """Yield the lines of a file in order, without a truncated last line.

        Raises:
            InputError: with file and line number: a complete line is something else, or the file cannot be read.
        """
        if not path.exists():
            return
        remedy = f"Name a file that `{self.writer}` wrote."
        with open_file(path, remedy) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE + 1), b""), start=1):
                found = _object(line)
                if not line.endswith(b"\n") and (found is None or self.key not in found):
                    if self._may_be_cut(line):
                        return
                    found = None
                version = None if found is None else found.get(self.key)
                if found is None or type(version) is not int:
                    raise InputError(f"this line is not a {self.one}.", remedy, f"{path}:{number}")
                if version > self.version:
                    what = self.one.partition(" ")[0]
                    raise InputError(f"a {what} of version {version}.", "Upgrade memcalc.", f"{path}:{number}")
                yield found

    def _write(self, descriptor: int, content: bytes) -> None:
        """Append complete lines; if that fails, truncate the file to its previous size.

        Raises:
            InputError: the file has other content.
            OSError: the disk is full.
        """
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            _write_all(descriptor, content)
            return
        end, whole = self._tail(descriptor)
        if end < os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, end)
        try:
            _write_all(descriptor, content if whole else b"\n" + content)
            os.fsync(descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, end)
            raise

    def _tail(self, descriptor: int) -> tuple[int, bool]:
        """Return the offset at which the next line begins, and whether a line break precedes it.

        Text after the last line break is kept if it is a complete line. If it is the beginning of one, the offset
        excludes it.

        Raises:
            InputError: the file has other content.
        """
        size = os.fstat(descriptor).st_size
        if size and not self._begins_like_one(os.pread(descriptor, TAIL, 0)):
            raise InputError(f"holds something other than {self.several}.")
        end = _last_line_break(descriptor, size)
        if end == size:
            return size, True
        if size - end > LONGEST_LINE:
            raise InputError(f"ends in a line that is longer than any {self.one.partition(' ')[0]}.")
        rest = os.pread(descriptor, size - end, end)
        if (found := _object(rest)) is not None and type(found.get(self.key)) is int:
            return size, False
        if not self._may_be_cut(rest):
            raise InputError(f"ends in something other than a {self.one.partition(' ')[0]}.")
        return end, True

    def _begins_like_one(self, text: bytes) -> bool:
        """Return whether text may be (the beginning of) a line, judged by its first characters.

        Blanks are ignored, because other writers insert them.
        """
        beginning = b'{"%s":' % self.key.encode()
        squeezed = b"".join(text.split())
        if squeezed.startswith(beginning):
            version = squeezed[len(beginning) :]
            return not version or version[:1].isdigit()
        return beginning.startswith(squeezed)

    def _may_be_cut(self, rest: bytes) -> bool:
        """Return whether the end of a file is a truncated line:

        it begins like a line and contains no complete JSON value.

        A complete value followed by more text on the same line is not truncated: other programs have joined such files.
        """
        if not self._begins_like_one(rest):
            return False
        try:
            json.JSONDecoder().raw_decode(rest.decode("utf-8", "replace").lstrip())
        except (ValueError, RecursionError):
            return True
        return False


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Hold an exclusive lock on a file, on systems that have such locks; it is released when the process ends.

    Raises:
        InputError: another process holds the lock for longer than `PATIENCE`.
    """
    try:
        import fcntl

        until = time.monotonic() + PATIENCE
        while not _taken(descriptor):
            if time.monotonic() > until:
                raise InputError(f"is locked by another process, for {PATIENCE:.0f} seconds by now.")
            time.sleep(0.01)
    except (ImportError, OSError):  # Windows; a file system without locks
        yield
        return
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _taken(descriptor: int) -> bool:
    """Take the lock if it is free, and return whether it was."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _last_line_break(descriptor: int, size: int) -> int:
    """Return the offset after the last line break; 0 if there is none. The search stops beyond the longest line."""
    end = size
    while end > 0 and size - end <= LONGEST_LINE:
        begin = max(0, end - TAIL)
        found = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return end


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
