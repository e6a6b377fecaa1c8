"""Temporary directories, removed by the process that made them, or by a later process if that one was killed.

While a process runs it holds a lock on a file in its directory, and the system releases the lock when the process
ends. A process that makes a directory of the same kind removes those that are no longer locked.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".lock"
COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # PyTorch's environment variable
_BEING_MADE = 10  # seconds during which a new directory may have no lock yet


@contextmanager
def temporary_directory(prefix: str, within: Path | None = None) -> Iterator[Path]:
    """Make a directory for this process, and remove it with its content at the end.

    Args:
        prefix: prefix of the directory's name, such as "memcalc-trace-".
        within: the parent directory; None: the system's directory for temporary files.
    """
    parent = Path(tempfile.gettempdir()) if within is None else within
    for stale in stale_directories(prefix, parent):
        shutil.rmtree(stale, ignore_errors=True)
    # The name is chosen before the directory is made: a signal may interrupt in between, and cleanup needs the name.
    folder = parent / f"{prefix}{os.urandom(8).hex()}"
    held = None
    try:
        folder.mkdir(mode=0o700)
        held = _hold(folder)
        yield folder
    finally:
        _remove(folder)
        if held is not None:
            os.close(held)


def _remove(folder: Path) -> None:
    """Remove a directory, even if a signal interrupts it."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def compiler_cache(folder: Path) -> dict[str, str]:
    """Return the variable that directs PyTorch's compiler cache to a directory; {} if the user has set it.

    On import, PyTorch's compiler makes `torchinductor_<user>` in the system's temporary directory, and leaves it there.
    """
    return {} if COMPILER_CACHE in os.environ else {COMPILER_CACHE: str(folder / "compiled")}


@contextmanager
def temporary_compiler_cache() -> Iterator[None]:
    """Direct the compiler cache of this process to a temporary directory, unless the user has set another."""
    with temporary_directory("memcalc-compiled-") as folder:
        variables = compiler_cache(folder)
        os.environ.update(variables)
        try:
            yield
        finally:
            for name in variables:
                os.environ.pop(name, None)


def stale_directories(prefix: str, parent: Path) -> list[Path]:
    """Return the directories of a kind that belong to this user and to no running process."""
    found = []
    with suppress(OSError):
        for path in parent.iterdir():
            with suppress(OSError):
                if path.name.startswith(prefix) and _is_stale(path):
                    found.append(path)
    return found


def _is_stale(path: Path) -> bool:
    about = path.lstat()
    own = getattr(os, "getuid", lambda: about.st_uid)()
    if about.st_uid != own or not path.is_dir() or path.is_symlink():
        return False
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return time.time() - about.st_mtime > _BEING_MADE
    try:
        return _take(descriptor)
    finally:
        os.close(descriptor)


def _hold(folder: Path) -> int:
    """Lock a directory, and return the descriptor of the lock file.

    On file systems without locks no other process can take the lock either, so the directory is kept.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    _take(descriptor)
    return descriptor


def _take(descriptor: int) -> bool:
    """Take the lock and return True; False if it is taken, or the file system has no locks."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True
