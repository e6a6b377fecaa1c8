"""Ranks as forks of one process, which has imported torch for all of them: python forked.py N SCRIPT [ARGS]...

More ranks fit a machine so than with torchrun, whose ranks each load torch for themselves.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys

import torch.distributed as dist
import torch.distributed.pipelining  # noqa: F401 -- for the forks

ranks = int(sys.argv[1])
sys.argv = sys.argv[2:]
with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = probe.getsockname()[1]
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # the store is here, as torchrun's is
children = []
for rank in range(ranks):
    child = os.fork()
    if child == 0:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit(0)
    children.append(child)
store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))
