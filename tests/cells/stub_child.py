"""In place of `memcalc.cells.child`: a GiB for each sequence of the micro-batch, at once; it counts its runs.

A cell with 3 layers is killed, until there is a file "spared".
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from memcalc.cells.cell import CellResult

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
    answer = CellResult(
        "measured", "fits" if size <= USABLE else "does-not-fit", size, size, size, USABLE - size, "backward_2", 1.5
    )
    Path(answer_file).write_text(json.dumps(asdict(answer)))


if __name__ == "__main__":
    main(*sys.argv[1:])
