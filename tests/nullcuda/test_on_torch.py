"""PyTorch's CUDA build on the null device: recorded peaks, real errors, whole commands. Needs `make .venv-null`."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from memcalc.cli.app import main
from memcalc.nullcuda import DryRun, environment, run
from memcalc.nullcuda.launcher import HOOK
from memcalc.nullcuda.result import DONE, FAILED, OUT_OF_MEMORY, STOPPED
from memcalc.spec.cards import find_card
from tests.nullcuda.scripts import TWO_STEPS_OF_DDP

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT / "benchmarks" / "recordings"
MIB, GIB = 2**20, 2**30

Script = Callable[..., DryRun]


@pytest.fixture
def dry_run(dry_run_here: Path, null_python: str) -> Script:
    """Runs a script's text on an H100; its output is kept in the file "out"."""

    def call(text: str, *arguments: str, gpus: int = 1, **named: Any) -> DryRun:
        (dry_run_here / "script.py").write_text(text)
        with (dry_run_here / "out").open("w") as out:
            return run([null_python, "script.py", *arguments], "h100-80gb", gpus=gpus, stdout=out, **named)

    return call


def test_nothing_of_nvidias_is_installed(null_python: str) -> None:
    """The libraries that PyTorch's build asks for stay away; Triton brings its own compiler. nvidia-ml-py is bindings
    of Python's, which find the stub.
    """
    code = "import importlib.metadata as m; print(*sorted({d.name.lower() for d in m.distributions()}))"
    names = subprocess.run([null_python, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert "torch" in names
    assert [name for name in names if name.startswith(("nvidia", "cuda"))] in ([], ["nvidia-ml-py"])


MEASURE = """
import json, sys
sys.path.insert(0, {root!r})
from memcalc.measuring import measure
from memcalc.spec.spec import Spec
record = json.loads({record!r})
measured = measure(Spec.model_validate_json(json.dumps(record["spec"])), "cuda", steps=3)
print(json.dumps([[p.name, p.peak_allocated_bytes, p.peak_reserved_bytes] for p in measured.phases]))
"""


@pytest.mark.parametrize("card", [pytest.param("a100-80gb", marks=pytest.mark.long), "h100-80gb"])
def test_recorded_runs_come_out_to_the_byte(card: str, dry_run_here: Path, null_python: str) -> None:
    """GPT-2 until its first backward has ended: every phase's peaks, allocated and reserved.

    What the optimizer's tensors find free then depends on which of the step's tensors was let go first, and that may
    change with memcalc's own modules.
    """
    with (RECORDINGS / f"null-{card}-torch-2.13.0.jsonl").open() as file:
        record = json.loads(file.readline())

    variables = os.environ | environment(card, pythons=[null_python])
    variables["PYTHONPATH"] += os.pathsep + str(ROOT)  # for the process that it starts in turn

    done = subprocess.run(
        [null_python, "-c", MEASURE.format(root=str(ROOT), record=json.dumps(record))],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    phases = json.loads(done.stdout.splitlines()[-1])
    recorded = [[p["name"], p["peak_allocated_bytes"], p["peak_reserved_bytes"]] for p in record["phases"]]
    first_backward = [name for name, *_ in recorded].index("backward_1")
    assert phases[: first_backward + 1] == recorded[: first_backward + 1]


# The size of GPT-2 small, and what a step of it needs on a real GPU too: matrix products, attention, AdamW.
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


CATCHES = """
import torch
size = 64
while True:
    try:
        a = torch.empty(size << 30, dtype=torch.uint8, device="cuda")
        b = torch.empty(size << 30, dtype=torch.uint8, device="cuda")
        break
    except torch.OutOfMemoryError as error:
        print(error)
        a = b = None
        size //= 2
print("size", size)
"""


def test_a_script_that_halves_its_batch_ends_at_the_right_one(dry_run: Script, dry_run_here: Path) -> None:
    """Of 79.10 GiB twice 64 does not fit, and twice 32 does."""
    result = dry_run(CATCHES)

    out = (dry_run_here / "out").read_text()
    assert out.endswith("size 32\n")
    assert "CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity of 79.10 GiB" in out
    assert (result.outcome, result.exit_code) == (DONE, 0)
    assert result.allocated_bytes == 64 * GIB
    assert result.device_bytes == 64 * GIB + find_card("h100-80gb").context_bytes


DIES = """
import torch
kept = [torch.empty(30 << 30, dtype=torch.uint8, device="cuda") for _ in range(3)]
"""


def test_a_script_that_dies_of_memory_says_pytorchs_own_words(dry_run_here: Path, null_python: str) -> None:
    (dry_run_here / "script.py").write_text(DIES)
    command = ["dry-run", "--gpu", "h100-80gb"]
    with redirect_stdout(io.StringIO()) as out:
        assert main([*command, "--record", "r.json", "--", null_python, "script.py"]) == 4

    assert "DOES NOT FIT: it ran out of the 79.10 GiB" in out.getvalue()
    document = json.loads((dry_run_here / "r.json").read_text())
    assert document["outcome"] == OUT_OF_MEMORY
    failure = document["processes"][0]["failure"]
    assert failure["type"] == "OutOfMemoryError"
    assert failure["message"].startswith("CUDA out of memory. Tried to allocate 30.00 GiB")
    with redirect_stdout(io.StringIO()):
        assert main([*command, "--assert-fits", "--", null_python, "script.py"]) == 1


TRAINS = """
import sys, torch
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024)
    def forward(self, x):
        hidden = self.a(x)
        return self.b(hidden)
model = Two().cuda()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(8192, 1024, device="cuda")
for step in range(1000):
    torch.cuda.reset_peak_memory_stats()
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.empty_cache()
    print(step, loss.item(), flush=True)
    assert "torch._dynamo" not in sys.modules  # what nobody uses is not loaded, for seconds
open("checkpoint", "w").close()
sys.exit(7)
"""


def test_the_command_stops_after_steps_and_keeps_a_record(
    dry_run: Script, dry_run_here: Path, null_python: str
) -> None:
    """hidden is 8192 x 4096 x 4 bytes = 128 MiB, and Hopper's cuBLAS workspace 32; resetting peaks loses none of ours."""
    (dry_run_here / "script.py").write_text(TRAINS)
    command = [
        "dry-run",
        "--gpu",
        "h100-80gb",
        "--steps",
        "3",
        "--record",
        "r.json",
        "--format",
        "json",
        "--assert-fits",
    ]
    with redirect_stdout(io.StringIO()) as out:
        assert main([*command, "--", null_python, "script.py"]) == 0

    document = json.loads(out.getvalue())
    assert document == json.loads((dry_run_here / "r.json").read_text())
    assert document["outcome"] == STOPPED
    assert not (dry_run_here / "checkpoint").exists()
    (process,) = document["processes"]
    assert process["steps"] == 3
    assert process["small_reads"] == 2  # the third loss was never read
    lines = {allocation["where"].rpartition("/")[2]: allocation["bytes"] for allocation in process["allocations"]}
    assert lines["script.py:8 forward"] == (128 + 32) * MIB
    assert document["peak"]["allocated_bytes"] > 128 * MIB
    assert document["fits"]


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


def test_a_script_that_fails_passes_its_code_on(dry_run: Script) -> None:
    result = dry_run(TRAINS.replace("range(1000)", "range(2)"))

    assert (result.outcome, result.exit_code) == (FAILED, 7)
    assert result.processes[0].steps == 2


FORKS = """
import multiprocessing, os, torch
def hold(device):
    torch.empty((device + 1) << 30, dtype=torch.uint8, device=f"cuda:{device}")
if __name__ == "__main__":
    for method, device in (("fork", 0), ("spawn", 1)):
        child = multiprocessing.get_context(method).Process(target=hold, args=(device,))
        child.start()
        child.join()
        assert child.exitcode == 0
    loader = torch.utils.data.DataLoader(range(8), batch_size=4, num_workers=1, pin_memory=True)
    assert [batch.is_pinned() for batch in loader] == [True, True]
"""


def test_processes_that_a_script_starts_are_seen(dry_run: Script) -> None:
    result = dry_run(FORKS, gpus=2)

    assert result.outcome == DONE
    assert sorted((usage.device, usage.allocated_bytes) for usage in result.usages) == [(0, GIB), (1, 2 * GIB)]


KILLED = """
import os, time, torch
weight = torch.zeros(1 << 28, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight])
for _ in range(2):
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    time.sleep(1.1)
os.kill(os.getpid(), 9)
"""


def test_a_process_that_is_killed_is_known_by_what_it_held_till_then(dry_run: Script) -> None:
    """It could not report at its end: weights and gradients of 1 GiB each are from its last step's report."""
    result = dry_run(KILLED)

    assert (result.outcome, result.exit_code) == (FAILED, 128 + 9)
    assert result.processes[0].steps == 2
    assert result.allocated_bytes >= 2 * GIB


HANGS = """
import subprocess, time, torch
held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
subprocess.Popen(["sleep", "61"], start_new_session=True)
time.sleep(61)
"""


def test_a_script_that_hangs_is_ended_with_what_it_held(dry_run_here: Path, null_python: str) -> None:
    """How long torch takes to load is for the machine to say: what has come nowhere in 6 seconds gets longer."""
    (dry_run_here / "script.py").write_text(HANGS)
    for seconds in ("6", "15", "50"):
        with redirect_stdout(io.StringIO()) as out:
            assert main(["dry-run", "--gpu", "a100-40gb", "--timeout", seconds, "--", null_python, "script.py"]) == 124
        if "NOTHING MEASURED" not in out.getvalue():
            break

    assert "FITS, as far as it came: 1.47 GiB" in out.getvalue()


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
    assert first.device_bytes - first.reserved_bytes == 1536 * MIB + find_card("h100-80gb").context_bytes


LARGE = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(16384, 16384) for _ in range(12)])
torch.empty(1 << 28).normal_()
model.cuda()
print(open("/proc/self/status").read())
"""


def test_weights_that_are_not_initialised_cost_the_host_nothing(dry_run: Script, dry_run_here: Path) -> None:
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


@pytest.mark.parametrize(("delayed", "blocks"), [(False, 1), pytest.param(True, 20, marks=pytest.mark.long)])
def test_events_bound_the_reuse_of_streams_memory(dry_run: Script, delayed: bool, blocks: int) -> None:
    """Complete at once, one block serves all twenty; delayed, none is free before the host waits."""
    result = dry_run(STREAMS, delayed_events=delayed)

    assert result.reserved_bytes == blocks * 100 * MIB
