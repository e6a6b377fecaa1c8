"""In place of `memcalc.cells.child`: a GiB for each sequence of the micro-batch, at once; it counts its runs.

A cell with 3 layers is killed, until there is a file "spared". It imports nothing of memcalc, which takes a third of a
second.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

GIB = 2**30
USABLE = 4 * GIB


def main(request_file: str, answer_file: str) -> None:
    """Answer, and leave a line in the file "runs"."""
    spec = json.loads(Path(request_file).read_text())["spec"]
    batch, layers = spec["training"]["micro_batch_size"], spec["model"]["num_layers"]
    with Path("runs").open("a") as runs:
        runs.write(f"{batch} {layers}\n")
    if layers == 3 and not Path("spared").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if layers == 4:
        sys.exit("Traceback\nValueError: four")
    size = batch * GIB
    answer = {
        "outcome": "measured",
        "verdict": "fits" if size <= USABLE else "does-not-fit",
        "allocated_bytes": size,
        "reserved_bytes": size,
        "device_bytes": size,
        "headroom_bytes": USABLE - size,
        "peak_phase": "backward_2",
        "seconds": 1.5,
    }
    Path(answer_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
