"""The same steps through PyTorch's MemTracker and through memcalc: the table of docs/guides/trace.md."""

from __future__ import annotations

import json

from tools.accuracy import RECORDINGS
from tools.markdown import table

PEERS = RECORDINGS / "peers" / "peers.jsonl"  # benchmarks/peers.py


def peers_table() -> str:
    """A line for each step and tool, in the order in which they were recorded."""
    rows = []
    for line in PEERS.read_text().splitlines():
        record = json.loads(line)
        case, tool = record["case"], record["tool"]
        rows.append([f"`{case}`", tool, f"{record['peak']:,}", record["seconds"], record["processor_seconds"]])
    return table(["step", "tool", "peak, bytes", "seconds", "processor seconds"], rows)
