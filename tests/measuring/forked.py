"""`memcalc ARGUMENTS` as N ranks, as torchrun would start them: forked from one process, which imports torch once.

`python forked.py N PORT ARGUMENTS...`; the ranks meet on this machine's PORT. The exit code is the worst of theirs.
"""

import importlib
import os
import sys

from memcalc.cli.app import main

IMPORTED_ONCE = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "memcalc.measuring.run_process",
)


def start(rank: int, ranks: int, port: str, arguments: list[str]) -> int:
    """The process that is this rank."""
    process = os.fork()
    if process == 0:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        code = 1
        try:
            code = main(arguments)
            sys.stdout.flush()
        finally:
            os._exit(code)
    return process


if __name__ == "__main__":
    _, number, meeting, *words = sys.argv
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    started = [start(rank, int(number), meeting, words) for rank in range(int(number))]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in started))
