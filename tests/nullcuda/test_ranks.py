"""What ranks tell each other on the null device reaches them: objects, flags, sums of one number, barriers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memcalc.errors import InputError
from memcalc.nullcuda import environment, run
from memcalc.nullcuda.gpu_description import NCCL_FIRST_BYTES, NCCL_FURTHER_BYTES
from memcalc.nullcuda.result import DONE
from tests.nullcuda.scripts import TWO_STEPS_OF_DDP, Script

TALKS = """
import json, multiprocessing, os, sys, time, torch, torch.distributed as dist

def talk(rank, world, groups):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(os.path.abspath("store"), world)
    asked = {"device_id": device} if groups == "split" else {}
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, **asked)
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

ranks = [multiprocessing.get_context("fork").Process(target=talk, args=(rank, 3, sys.argv[1])) for rank in range(3)]
for rank in ranks:  # by fork: torch is loaded once; by torchrun, see test_on_torch
    rank.start()
for rank in ranks:
    rank.join()
sys.exit(max(rank.exitcode for rank in ranks))
"""


@pytest.mark.parametrize("groups", ["anew", pytest.param("split", marks=pytest.mark.long)])
def test_small_messages_reach_the_other_ranks(dry_run_here: Path, null_python: str, groups: str) -> None:
    """1 + 2 + 3 = 6; rank 0 makes a file a second late, and the barrier holds the others back until then."""
    (dry_run_here / "script.py").write_text(TALKS)

    result = run([null_python, "script.py", groups], "h100-80gb", gpus=3, timeout=60)

    assert result.outcome == DONE
    for rank in range(3):
        heard = json.loads((dry_run_here / f"heard-{rank}").read_text())
        assert heard["made"]
        assert heard["told"] == ["a" * 10, {"x": [1, 2, 3]}]
        assert (heard["total"], heard["largest"]) == (6, 2.5)
        assert heard["all"] == ["", "z", "zz"]
        assert heard["passed"] == ({"shape": [3, 4]} if rank < 2 else None)
        assert heard.get("flag") == (None if rank == 1 else 25)


FAKES = """
import torch, torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
x = torch.ones(4, device="cuda")
for _ in range(2):
    dist.all_gather_into_tensor(x.repeat(2), x, group=mesh.get_group("a"))
    all_reduce(x, "sum", mesh["b"])
dist.all_reduce(x, group=dist.new_group([0]))
"""


@pytest.mark.long
def test_fake_groups_take_what_nccls_would(dry_run_here: Path, null_python: str) -> None:
    """Two of the five have more than one rank and talked: over "a" by a function, over "b" by an operator."""
    (dry_run_here / "script.py").write_text(FAKES)

    result = run([null_python, "script.py"], "h100-80gb")

    assert result.outcome == DONE
    (usage,) = result.usages
    assert usage.communication_bytes == NCCL_FIRST_BYTES + NCCL_FURTHER_BYTES
    assert usage.device_bytes - usage.reserved_bytes == usage.communication_bytes + result.gpu.context_bytes


ALONE = f"""{TWO_STEPS_OF_DDP}
import json
dist.barrier(dist.new_group(range(0, dist.get_world_size(), 2), backend="gloo"))
with open("heard", "w") as file:
    json.dump([dist.get_rank(), dist.get_world_size(), words], file)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_one_rank_of_many_runs_alone(dry_run_here: Path, null_python: str) -> None:
    """The script is DDP's of every day, of 64 ranks, and rank 6 the only one: what it gathers is its own word. It
    holds what two ranks of two hold: weights, gradients, buckets of 64 MiB each, the broadcast's copy, two workspaces
    of 32 MiB, and perhaps the first bucket still.
    """
    (dry_run_here / "script.py").write_text(ALONE)

    result = run([null_python, "script.py"], "h100-80gb", gpus=8, world_size=64, rank=6, timeout=60)

    assert result.outcome == DONE
    assert json.loads((dry_run_here / "heard").read_text()) == [6, 64, [{"rank": 6}] * 64]
    (usage,) = result.usages
    assert (usage.rank, usage.device) == (6, 6)
    assert usage.allocated_bytes >> 20 in {5 * 64, 6 * 64}
    assert usage.communication_bytes == NCCL_FIRST_BYTES


COUNTS = """
import json, os, torch, torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
chosen = torch.rand(64, 16, device="cuda").topk(2).indices
counts = torch.histc(chosen.view(-1), bins=16, min=0, max=16)
received = collectives.all_to_all_single(counts, None, None, group=dist.group.WORLD)
sizes = collectives.wait_tensor(received).view(4, -1).sum(dim=1).tolist()
tokens = torch.empty(sum(sizes), 8, device="cuda")
with open("heard", "w") as file:
    json.dump([sizes, len(tokens)], file)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_rank_alone_receives_as_many_tokens_as_it_sends_itself(dry_run_here: Path, null_python: str) -> None:
    """64 tokens choose 2 of 16 experts, which 4 ranks hold: each expert gets 8 copies, each rank 32 from each other."""
    (dry_run_here / "script.py").write_text(COUNTS)

    result = run([null_python, "script.py"], "h100-80gb", gpus=4, world_size=4, rank=3, timeout=60)

    assert result.outcome == DONE
    assert json.loads((dry_run_here / "heard").read_text()) == [[32] * 4, 128]
    (process,) = result.processes
    assert process.small_reads == 0


def test_a_rank_that_is_none_is_refused(null_python: str) -> None:
    with pytest.raises(InputError, match=r"rank = 8 is out of range\. Choose 0 to 7"):
        environment("h100-80gb", pythons=[null_python], world_size=8, rank=8)
    with pytest.raises(InputError, match="rank = 1, but the number of ranks of the run is missing"):
        environment("h100-80gb", pythons=[null_python], rank=1)


BUCKETS = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(0)
layers = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(8))).cuda()
model = torch.nn.parallel.DistributedDataParallel(layers, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.zeros(1, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(torch.cuda.memory_allocated() >> 20)
"""


@pytest.mark.long
def test_the_first_bucket_of_ddp_is_freed_before_the_second_step(dry_run: Script, dry_run_here: Path) -> None:
    """8 weights of 2048 x 2048 x 4 bytes = 16 MiB each, and buckets of as many bytes: 256 MiB, and 64 of workspaces.

    NCCL's watchdog, which looks ten times per second, has to see the end of the first bucket's all-reduce.
    """
    dry_run(BUCKETS, world_size=2)

    assert (dry_run_here / "out").read_text().split() == ["320"] * 3
