"""What ranks tell each other on the null device reaches them: objects, flags, sums of one number, barriers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memcalc.nullcuda import run
from memcalc.nullcuda.result import DONE

TALKS = """
import json, os, sys, time, torch, torch.distributed as dist
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", **({"device_id": device} if sys.argv[1] == "split" else {}))
rank, world = dist.get_rank(), dist.get_world_size()
if rank == 0:
    time.sleep(1)
    open("made", "w").close()
dist.barrier()
heard = {"made": os.path.exists("made")}
told = ["a" * 10, {"x": [1, 2, 3]}] if rank == 0 else [None, None]
dist.broadcast_object_list(told, src=0)
heard["told"] = told
total = torch.tensor([rank + 1], device=device)
dist.all_reduce(total)
heard["total"] = total.item()
largest = torch.tensor(rank + 0.5, device=device)
dist.all_reduce(largest, op=dist.ReduceOp.MAX)
heard["largest"] = largest.item()
heard["all"] = [None] * world
dist.all_gather_object(heard["all"], "z" * rank)
passed = [{"shape": [3, 4]}] if rank == 0 else [None]
if rank == 0:
    dist.send_object_list(passed, dst=1)
if rank == 1:
    dist.recv_object_list(passed, src=0)
heard["passed"] = passed[0]
pair = dist.new_group([0, 2])  # with device_id, by ncclCommSplit: every rank of the parent takes part
if rank != 1:
    flag = torch.tensor([10 * rank + 5], device=device)
    dist.broadcast(flag, src=2, group=pair)
    heard["flag"] = flag.item()
with open(f"heard-{rank}", "w") as file:
    json.dump(heard, file)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("groups", ["anew", "split"])
def test_small_messages_reach_the_other_ranks(dry_run_here: Path, null_python: str, groups: str) -> None:
    """1 + 2 + 3 = 6; rank 0 makes a file a second late, and the barrier holds the others back until then."""
    (dry_run_here / "script.py").write_text(TALKS)
    launcher = [null_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]

    result = run([*launcher, "script.py", groups], "h100-80gb", gpus=3, timeout=100)

    assert result.outcome == DONE
    for rank in range(3):
        heard = json.loads((dry_run_here / f"heard-{rank}").read_text())
        assert heard["made"]
        assert heard["told"] == ["a" * 10, {"x": [1, 2, 3]}]
        assert (heard["total"], heard["largest"]) == (6, 2.5)
        assert heard["all"] == ["", "z", "zz"]
        assert heard["passed"] == ({"shape": [3, 4]} if rank < 2 else None)
        assert heard.get("flag") == (None if rank == 1 else 25)
