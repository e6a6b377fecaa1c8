"""Temporary directories: each goes with the process that made it, or is removed by the next one that makes such.

A process that is killed cannot remove anything. While it lives it holds a lock on a file in its directory, which the
system releases with it; whoever makes a directory of the same kind removes those that nobody holds any more.
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
COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # PyTorch's own variable
_BEING_MADE = 10  # seconds in which a directory may still have no lock


@contextmanager
def temporary_folder(kind: str, within: Path | None = None) -> Iterator[Path]:
    """A directory of this process alone, removed at the end with all that is in it.

    Args:
        kind: what its name begins with, such as "memcalc-trace-".
        within: where it is made; None: the system's directory for temporary files.
    """
    parent = Path(tempfile.gettempdir()) if within is None else within
    for stale in stale_folders(kind, parent):
        shutil.rmtree(stale, ignore_errors=True)
    # Named before it is made: a signal may come at any moment, and what it ends must know what to remove.
    folder = parent / f"{kind}{os.urandom(8).hex()}"
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
    """Remove a directory, also if a signal comes meanwhile."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def compiler_cache(folder: Path) -> dict[str, str]:
    """Return the variable that has PyTorch's compiler write into a directory; nothing where the user names one.

    PyTorch makes `torchinductor_<user>` among the temporary files when its compiler is imported, and leaves it there.
    """
    return {} if COMPILER_CACHE in os.environ else {COMPILER_CACHE: str(folder / "compiled")}


@contextmanager
def temporary_compiler_cache() -> Iterator[None]:
    """Inside, this process's compiler writes into a temporary directory, unless the user names another."""
    with temporary_folder("memcalc-compiled-") as folder:
        variables = compiler_cache(folder)
        os.environ.update(variables)
        try:
            yield
        finally:
            for name in variables:
                os.environ.pop(name, None)


def stale_folders(kind: str, parent: Path) -> list[Path]:
    """Return the directories of a kind that belong to this user, and to no process any more."""
    found = []
    with suppress(OSError):
        for path in parent.iterdir():
            with suppress(OSError):
                if path.name.startswith(kind) and _is_stale(path):
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
    """Where the file system has no locks, nobody else can take this one either, and the directory stays."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    _take(descriptor)
    return descriptor


def _take(descriptor: int) -> bool:
    """Whether the lock could be taken; False, too, where there are no locks."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True
