"""The unpickling process: `python -I worker.py FILE`, with limited memory and the result on standard output.

A malicious pickle can exhaust the memory or the stack of its reader, although it cannot call anything. It then ends
only this process.
"""

from __future__ import annotations

import gc
import marshal
import os
import sys
from pathlib import Path

BASE_BYTES = 2**30  # of address space, for the interpreter and small files
BYTES_PER_BYTE = 64  # the objects of a snapshot need some 10 to 30 times the bytes of their pickle

OK, REFUSED = 0, 3


def main(path: str) -> int:
    """Read the file; return 0 with the packed snapshot on standard output, or 3 with the reason."""
    from memcalc.snapshots.packing import pack
    from memcalc.snapshots.unpickling import TruncatedFile, UnsafePickle, content_of, loads_plain, salvaged

    gc.disable()  # there is no garbage here, and searching for it takes most of the time
    try:
        content = content_of(Path(path))
        _limit_memory(len(content))
        try:
            packed = pack(loads_plain(content))
        except TruncatedFile:
            packed = pack(*salvaged(content))
    except UnsafePickle as refused:
        sys.stdout.write(str(refused))
        return REFUSED
    except (MemoryError, RecursionError):
        sys.stdout.write("it requests more memory than a file of its size can need")
        return REFUSED
    marshal.dump(packed, sys.stdout.buffer)
    sys.stdout.flush()
    os._exit(OK)  # skips the deallocation of a million objects


def _limit_memory(size: int) -> None:
    """Limit the address space according to the pickle's size, if the system supports it."""
    try:
        import resource
    except ImportError:  # Windows
        return
    wanted = BASE_BYTES + BYTES_PER_BYTE * size
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or wanted < hard:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main(sys.argv[1]))
