"""PyTorch's CUDA build on the null device: recorded peaks, whole commands, PyTorch's allocator. Needs `make .venv-null`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memcalc
from memcalc.nullcuda import run
from memcalc.nullcuda.launcher import HOOK
from memcalc.nullcuda.result import DONE
from memcalc.spec.hardware.gpus import find_gpu
from memcalc.spec.spec import Spec
from tests.nullcuda.scripts import TWO_STEPS_OF_DDP, Script

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT / "benchmarks" / "recordings"
MIB, GIB = 2**20, 2**30


def test_nothing_of_nvidias_is_installed(null_python: str) -> None:
    """The libraries that PyTorch's build asks for stay away; Triton brings its own compiler. nvidia-ml-py is bindings
    of Python's, which find the stub.
    """
    code = "import importlib.metadata as m; print(*sorted({d.name.lower() for d in m.distributions()}))"
    names = subprocess.run([null_python, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert "torch" in names
    assert [name for name in names if name.startswith(("nvidia", "cuda"))] in ([], ["nvidia-ml-py"])


@pytest.mark.long
@pytest.mark.parametrize("card", ["a100-80gb", "h100-80gb"])
def test_recorded_runs_come_out_to_the_byte(card: str, null_python: str) -> None:
    """GPT-2 until its first backward has ended: every phase's peaks, allocated and reserved.

    What the optimizer's tensors find free then depends on which of the step's tensors was freed first, and that may
    change with memcalc's own modules.
    """
    with (RECORDINGS / f"null-{card}-torch-2.13.0.jsonl").open() as file:
        record = json.loads(file.readline())

    spec = Spec.model_validate_json(json.dumps(record["spec"]))
    found = memcalc.measure(spec, device=f"null:{card}", python=null_python, steps=1)
    phases = [[each.name, each.peak_allocated_bytes, each.peak_reserved_bytes] for each in found.phases]
    recorded = [[p["name"], p["peak_allocated_bytes"], p["peak_reserved_bytes"]] for p in record["phases"]]
    first_backward = [name for name, *_ in recorded].index("backward_1")
    assert phases[: first_backward + 1] == recorded[: first_backward + 1]


# The size of GPT-2 small, and what a step of it needs on a real GPU too: matmuls, attention, AdamW.
GPT2 = """
import time, torch, torch.nn.functional as F
class Block(torch.nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = torch.nn.LayerNorm(d), torch.nn.LayerNorm(d)
        self.qkv, self.o = torch.nn.Linear(d, 3 * d), torch.nn.Linear(d, d)
        self.up, self.down = torch.nn.Linear(d, 4 * d), torch.nn.Linear(4 * d, d)
    def forward(self, x):
        b, s, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, s, 3, 12, d // 12).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))
with torch.device("cuda"):  # where random numbers cost nothing
    model = torch.nn.Sequential(torch.nn.Embedding(50257, 768), *[Block(768) for _ in range(12)],
                                torch.nn.Linear(768, 50257, bias=False)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
tokens = torch.randint(50257, (1, 1024)).cuda()
"""

STEPS = (
    GPT2
    + """
times = []
from torch.nn.attention import SDPBackend, sdpa_kernel
sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]).__enter__()  # the first of them is not there
for _ in range(12):
    start = time.process_time()  # of the processor: others may be at work on the machine
    F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.process_time() - start)
print(min(times))
"""
)


@pytest.mark.long
def test_a_gpt2_step_takes_milliseconds(dry_run: Script, dry_run_here: Path) -> None:
    result = dry_run(STEPS)

    assert result.outcome == DONE
    assert result.processes[0].steps == 12
    assert float((dry_run_here / "out").read_text()) < 0.05  # benchmarks/nullcuda.py has the figure
    assert result.fits


COMPILES = """
import torch
from torch._compile import _disable_dynamo
@_disable_dynamo
def double(x):
    return 2 * x
weight = torch.ones(4, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight])
def step(x):
    double(weight * x).sum().backward()
    optimizer.step()
step(1)
assert not hasattr(double.__wrapped__, "__dynamo_disable")
torch.compile(lambda x: double(x + 1) * 3, backend="eager")(weight)
step(1)
assert hasattr(double.__wrapped__, "__dynamo_disable")
from torch._dynamo.utils import counters
assert len(counters["graph_break"]) == 1, counters
"""


@pytest.mark.long
def test_a_program_that_compiles_finds_the_compiler_told_where_not_to_look(dry_run: Script) -> None:
    """One graph on either side of what must not be looked into, as without the null device."""
    assert dry_run(COMPILES).outcome == DONE


@pytest.mark.long
def test_two_ranks_train_with_ddp(dry_run_here: Path, null_python: str) -> None:
    """4096 x 4096 x 4 bytes: weights, the broadcast's copy, gradients and buckets of 64 MiB each, and two workspaces
    of 32 MiB. The first bucket lives until NCCL's watchdog thread has seen its all-reduce done, which may be before or
    after the second step makes another: 64 MiB that either rank has or has not. NCCL's 1.5 GiB are outside of them.
    """
    (dry_run_here / "script.py").write_text(f"{TWO_STEPS_OF_DDP}\ndist.destroy_process_group()\n")
    launcher = [null_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]

    result = run(launcher, "h100-80gb", gpus=2)

    assert result.outcome == DONE
    assert [(process.rank, process.steps) for process in result.processes] == [(0, 2), (1, 2)]
    first, second = result.usages
    for usage in result.usages:
        assert (usage.allocated_bytes // MIB) in {5 * 64, 6 * 64}
    assert second.communication_bytes == first.communication_bytes
    assert first.communication_bytes == 1536 * MIB
    assert first.device_bytes - first.reserved_bytes == 1536 * MIB + find_gpu("h100-80gb").context_bytes


LARGE = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(16384, 16384) for _ in range(12)])
torch.empty(1 << 28).normal_()
model.cuda()
print(open("/proc/self/status").read())
"""


@pytest.mark.long
def test_weights_that_are_not_initialized_cost_the_host_nothing(dry_run: Script, dry_run_here: Path) -> None:
    """12 GiB of fp32 weights and 1 GiB of noise."""
    result = dry_run(LARGE, skip_init=True)

    assert result.outcome == DONE
    assert 12 * GIB < result.allocated_bytes < 12.1 * GIB
    most = re.search(r"VmHWM:\s+(\d+) kB", (dry_run_here / "out").read_text())
    assert most is not None
    assert int(most[1]) < 2 * 2**20


@pytest.mark.long
def test_the_environment_is_the_programs_own(dry_run: Script, dry_run_here: Path) -> None:
    """Its sitecustomize runs, torch can be looked for without being imported, and it can see where it is. Another
    memcalc's hook, from a dry run around this one, stays out of it.
    """
    shutil.copytree(HOOK, dry_run_here / "other")
    (dry_run_here / "site").mkdir()
    (dry_run_here / "site" / "sitecustomize.py").write_text("import builtins; builtins.customized = True")
    text = """
import importlib.util, os
assert importlib.util.find_spec("torch") is not None
assert customized
import torch
print(os.environ["MEMCALC_NULL_CARD"], torch.cuda.get_device_name(), torch.cuda.device_count())
"""
    os.environ["PYTHONPATH"] = os.pathsep.join(str(dry_run_here / name) for name in ("other", "site"))
    try:
        result = dry_run(text, gpus=3)
    finally:
        del os.environ["PYTHONPATH"]

    assert result.exit_code == 0
    assert (dry_run_here / "out").read_text() == "h100-80gb NVIDIA H100 80GB HBM3 3\n"
    assert result.fits is None  # it looked at cards, and used none
    assert sys.executable not in result.command


SEGMENTS = """
import torch
held = [torch.empty(100 << 20, dtype=torch.uint8, device="cuda:1") for _ in range(5)]
assert held[0].get_device() == 1
print(torch.cuda.memory_reserved(1))
del held
torch.cuda.empty_cache()
print(torch.cuda.memory_reserved(1))
"""


@pytest.mark.long
def test_expandable_segments_grow_and_shrink(
    dry_run: Script, dry_run_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 MiB in pages of 20 MiB: no more than that is reserved, and all of it comes back."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    result = dry_run(SEGMENTS, gpus=2)

    assert result.outcome == DONE
    assert (dry_run_here / "out").read_text().split() == [str(500 * MIB), "0"]
    assert [(usage.device, usage.reserved_bytes) for usage in result.usages] == [(1, 500 * MIB)]


STREAMS = """
import torch
side = torch.cuda.Stream()
for _ in range(20):
    x = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
    x.record_stream(side)
    del x
"""


@pytest.mark.long
@pytest.mark.parametrize(("delayed", "blocks"), [(False, 1), (True, 20)])
def test_events_bound_the_reuse_of_streams_memory(dry_run: Script, delayed: bool, blocks: int) -> None:
    """Complete at once, one block serves all twenty; delayed, none is free before the host waits."""
    result = dry_run(STREAMS, delayed_events=delayed)

    assert result.reserved_bytes == blocks * 100 * MIB
