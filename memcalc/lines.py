"""Files of JSON lines, one a run, appended whole and never changed.

A process can be killed in the middle of a write. What it leaves then is a line without its end: readers leave it out,
and whoever appends next takes it away first, since the run that it was of is not finished. Nothing else is ever taken
away: a whole line without its line break stays, and a file that holds something else is refused.
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

TAIL = 1 << 16  # bytes looked at for the end of the last whole line; lines may be longer
LONGEST_LINE = 1 << 26  # bytes; the records of the largest runs have some 10^5
PATIENCE = 20.0  # seconds to wait for whoever else writes, which takes milliseconds


class Lines(NamedTuple):
    """A kind of file of lines.

    Args:
        key: the first key of every line, whoever wrote it; its value is the version of the line's format.
        version: the newest version.
        one: what a line is, for messages: "record of a measured run".
        several: lines, for messages: "records".
        option: that names such a file: "--record".
        writer: the command that writes them: "measure".
    """

    key: str
    version: int
    one: str
    several: str
    option: str
    writer: str

    def append(self, values: Iterable[dict[str, Any]], path: Path) -> None:
        """Add lines that belong together, in one write; when this returns, they are on the disk.

        Runs that share a file wait for each other, so lines do not mix.

        Raises:
            NotWritten: the disk is full, or the file holds something else by now. It is as it was before.
        """
        lines = (json.dumps(value, separators=(",", ":"), ensure_ascii=False) + "\n" for value in values)
        content = "".join(lines).encode("utf-8", "backslashreplace")  # lone surrogates, as JSON writes them
        remedy = f"The result is printed, but not kept: free space, or name another {self.option}."
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
        """Refuse a file that lines cannot be appended to, before anything is run for it.

        Raises:
            InputError: it holds something else, or cannot be written.
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
            raise InputError(f"cannot be used: {error.strerror}.", remedy, place) from None
        except ValueError:  # a null character
            raise InputError("cannot be used: the name is invalid for a file.", remedy, place) from None
        if not stat.S_ISREG(mode) and not stat.S_ISCHR(mode):  # /dev/null keeps nothing, by request
            raise InputError(f"is {kind_of(mode)}, not a file.", remedy, place)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}.", remedy, place) from None
        try:
            if stat.S_ISREG(mode):
                with _locked(descriptor):
                    self._tail(descriptor)
        except InputError as error:
            raise InputError(error.problem, remedy, place) from None
        finally:
            os.close(descriptor)

    def read(self, path: Path) -> Iterator[dict[str, Any]]:
        """Yield the lines of a file, in order; a last one that was cut off in writing is left out.

        Raises:
            InputError: with file and line, where a whole line is something else, or the file cannot be read.
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
        """Append whole lines; what cannot be written whole is taken back.

        Raises:
            InputError: the file holds something else.
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
        """Where the next line may begin: after all that is worth keeping, and whether that ends with a line break.

        What follows the last line break is kept if it is a whole line, and cut away if it begins like one.

        Raises:
            InputError: the file holds something else.
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
        """Whether text may be (the beginning of) a line, by its first letters: other writers put blanks there."""
        beginning = b'{"%s":' % self.key.encode()
        squeezed = b"".join(text.split())
        if squeezed.startswith(beginning):
            version = squeezed[len(beginning) :]
            return not version or version[:1].isdigit()
        return beginning.startswith(squeezed)

    def _may_be_cut(self, rest: bytes) -> bool:
        """Whether the end of a file is a line that was cut off: it begins like one, and no JSON ends in it.

        A whole one that something follows in the same line is not: a file that others have put together.
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
    """Alone with a file, where the system has such locks; the lock goes with the process that holds it.

    Raises:
        InputError: another process holds it, and keeps it.
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
    """Whether the lock was free."""
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
    """The place after the last line break; 0 where there is none; not looked for beyond the longest line."""
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
