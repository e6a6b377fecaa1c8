"""How programs on the null device end: by themselves, after steps, of memory, killed, hanging. Needs `make .venv-null`."""

from __future__ import annotations

import io
import json
import re
import signal
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from memcalc.cli.app import main
from memcalc.nullcuda.result import DONE, FAILED, OUT_OF_MEMORY, STOPPED, TIMED_OUT
from memcalc.spec.hardware.gpus import find_gpu
from tests.nullcuda.scripts import Ended, Script

MIB, GIB = 2**20, 2**30


@pytest.fixture(scope="module")
def ended(run_all: Callable[..., dict[str, Ended]]) -> dict[str, Ended]:
    """How each script that ends by itself ended."""
    scripts = {
        "catches": CATCHES,
        "saves": SAVES,
        "engine": STEPS_OF_AN_ENGINE,
        "interrupted": INTERRUPTS,
        "killed": KILLED,
    }
    scripts["fails"] = TRAINS.replace("range(1000)", "range(2)")
    return run_all({**scripts, "full": FULL.format(anyway=False)})


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


def test_a_script_that_halves_its_batch_ends_at_the_right_one(ended: dict[str, Ended]) -> None:
    """Of 79.10 GiB twice 64 does not fit, and twice 32 does."""
    result, out = ended["catches"].run, ended["catches"].out

    assert ended["catches"].code == 0
    assert out.endswith("size 32\n")
    assert "CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity of 79.10 GiB" in out
    assert (result.outcome, result.exit_code) == (DONE, 0)
    assert result.fits is None  # the size that was requested does not
    assert result.allocated_bytes == 64 * GIB
    assert result.device_bytes == 64 * GIB + find_gpu("h100-80gb").context_bytes


FULL = """
import os, torch, memcalc_watch
write = memcalc_watch.write

def full(path, text):
    if {anyway} or os.path.exists(os.path.join(os.path.dirname(path), memcalc_watch.RESERVE)):
        raise OSError(28, os.strerror(28))
    write(path, text)

memcalc_watch.write = full
kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
"""


def test_a_disk_that_is_full_when_the_process_ends(ended: dict[str, Ended]) -> None:
    """There is room that was kept for its report."""
    result = ended["full"].run

    assert (result.outcome, result.allocated_bytes, result.lost) == (DONE, GIB, 0)


INTERRUPTS = """
import builtins, json, torch, memcalc_watch
write = memcalc_watch.write

class Interrupted:
    def __init__(self, part, path, text):
        self.file, self.path, self.text = builtins.open(part, "w"), path, text
    def __enter__(self):
        return self
    def write(self, text):
        memcalc_watch.open = builtins.open
        write(self.path, self.text)
        self.file.write(text)
    def __exit__(self, *error):
        self.file.close()
        with open(self.path) as whole:
            json.load(whole)  # nothing of the shorter report is written into this one

def writes(path, text):
    shorter = json.dumps({**json.loads(text), "torch": ""})
    memcalc_watch.open = lambda part, mode: Interrupted(part, path, text)
    write(path, shorter)

memcalc_watch.write = writes
kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
"""


def test_two_reports_at_once_are_complete(ended: dict[str, Ended]) -> None:
    """A signal handler, or a thread that waited too long, writes a report while another one is written."""
    assert ended["interrupted"].run.allocated_bytes == GIB


@pytest.mark.long
def test_a_report_that_is_lost_all_the_same_is_said(
    dry_run_here: Path, null_python: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (dry_run_here / "script.py").write_text(FULL.format(anyway=True))
    code = main(["dry-run", "--gpu", "h100-80gb", "--assert-fits", "--", null_python, "script.py"])
    out, err = capfd.readouterr()

    assert code == 3
    assert "NOTHING MEASURED" in out
    assert "error: the temporary report of a process could not be written: its disk is full. Its contents are" in err


DIES = """
import torch
kept = [torch.empty(30 << 30, dtype=torch.uint8, device="cuda") for _ in range(3)]
"""


def test_a_script_that_dies_of_memory_says_pytorchs_own_words(dry_run_here: Path, null_python: str) -> None:
    (dry_run_here / "script.py").write_text(DIES)
    with redirect_stdout(io.StringIO()) as out:
        assert main(["dry-run", "--gpu", "h100-80gb", "--record", "r.json", "--", null_python, "script.py"]) == 4

    assert "DOES NOT FIT: the run exceeds the 79.10 GiB" in out.getvalue()
    document = json.loads((dry_run_here / "r.json").read_text())
    assert document["outcome"] == OUT_OF_MEMORY
    failure = document["processes"][0]["failure"]
    assert failure["type"] == "OutOfMemoryError"
    assert failure["message"].startswith("CUDA out of memory. Tried to allocate 30.00 GiB")


@pytest.mark.long
def test_a_script_that_dies_of_memory_does_not_fit_as_asserted(dry_run_here: Path, null_python: str) -> None:
    (dry_run_here / "script.py").write_text(DIES)
    with redirect_stdout(io.StringIO()):
        assert main(["dry-run", "--gpu", "h100-80gb", "--assert-fits", "--", null_python, "script.py"]) == 1


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


def test_a_script_that_fails_passes_its_code_on(ended: dict[str, Ended], dry_run: Script) -> None:
    """After steps, and without torch, which takes seconds to import."""
    result = dry_run("import sys; sys.exit(7)")

    assert (result.outcome, result.exit_code) == (FAILED, 7)
    assert ended["fails"].code == 7
    assert ended["fails"].run.processes[0].steps == 2


FAILS_BELOW_A_LAUNCHER = """
import subprocess, sys, torch
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "child"], check=True)
raise ImportError("install more")
"""


@pytest.mark.long
def test_the_first_failure_is_that_of_the_program_and_not_of_its_launcher(dry_run: Script) -> None:
    result = dry_run(FAILS_BELOW_A_LAUNCHER)

    assert (result.outcome, result.processes) == (FAILED, ())
    assert result.doubt == "no process of the command used the GPU through PyTorch (ImportError: install more)"


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


@pytest.mark.long
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


def test_a_process_that_is_killed_is_known_by_what_it_held_till_then(ended: dict[str, Ended]) -> None:
    """It could not report at its end: weights and gradients of 1 GiB each are from its last step's report."""
    result = ended["killed"].run

    assert ended["killed"].code == -9
    assert result.processes[0].steps == 2
    assert result.allocated_bytes >= 2 * GIB


HANGS = """
import subprocess, time, torch
held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
subprocess.Popen(["sleep", "61"], start_new_session=True)
time.sleep(61)
"""


@pytest.mark.long
def test_a_script_that_hangs_is_ended_with_what_it_held(dry_run_here: Path, null_python: str) -> None:
    """How long torch takes to load is for the machine to say: what has come nowhere in 6 seconds gets longer."""
    (dry_run_here / "script.py").write_text(HANGS)
    for seconds in ("6", "15", "50"):
        with redirect_stdout(io.StringIO()) as out:
            assert main(["dry-run", "--gpu", "a100-40gb", "--timeout", seconds, "--", null_python, "script.py"]) == 124
        if "NOTHING MEASURED" not in out.getvalue():
            break

    assert (
        "CANNOT SAY: timed out before the first optimizer step was complete. Until then it held at most 1.73 GiB"
        in " ".join(out.getvalue().split())
    )


LONG_CALL = """
import ctypes, os, signal, torch
signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
open("began", "w").close()
ctypes.PyDLL(None).sleep(61)  # with Python's lock held: no handler and no thread can run
"""


@pytest.mark.long
def test_a_process_that_is_killed_in_a_long_call_is_known_by_the_devices_books(
    dry_run: Script, dry_run_here: Path
) -> None:
    result = dry_run(LONG_CALL, timeout=20)

    assert (dry_run_here / "began").exists()
    assert (result.outcome, result.exit_code) == (TIMED_OUT, 128 + signal.SIGKILL)
    assert result.reserved_bytes == 4 * GIB
    assert result.device_bytes == 4 * GIB + find_gpu("h100-80gb").context_bytes
    assert result.fits is None
    if not result.allocated_bytes:  # else a report was written between the request and the call
        assert "was killed before its last report" in result.warnings[0]


CATCHES_AND_WAITS = """
import time, torch
try:
    torch.empty(90 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    open("caught", "w").close()
    time.sleep(61)
"""


@pytest.mark.long
def test_memory_that_ran_out_before_the_time_does_not_fit_as_far_as_it_came(dry_run: Script) -> None:
    result = dry_run(CATCHES_AND_WAITS, timeout=20)

    assert (result.outcome, result.fits) == (TIMED_OUT, None)
    assert result.doubt == "the GPU's memory ran out once, and the program ended differently (timed out)"


SAVES = """
import sys, torch
model = torch.nn.Linear(1024, 1024).cuda()
torch.save({"step": 1}, "scheduler.pt")
torch.save(model.state_dict(), "model.pt")
"""


def test_checkpoints_of_zeros_are_said(ended: dict[str, Ended]) -> None:
    (warning,) = ended["saves"].run.warnings
    (path,) = re.findall(r"\((.*)\)", warning)

    assert Path(path).is_absolute()
    assert Path(path).name == "model.pt"
    assert warning == (
        f"1 checkpoint file written, with zeros for weights ({path}): do not load them, or end the run earlier with "
        "--steps"
    )


NO_WEIGHTS = """
import json, torch, transformers
config = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
config.save_pretrained("model")
transformers.LlamaForCausalLM.from_pretrained("model").cuda()
"""


@pytest.mark.long
def test_a_program_without_weights_gets_the_remedy_random_weights(dry_run: Script) -> None:
    """The program fails before it uses the GPU."""
    result = dry_run(NO_WEIGHTS)

    assert (result.outcome, result.processes) == (FAILED, ())
    assert (
        "the program found no weights to load: --random-weights builds the model from its config alone"
        in result.warnings
    )
    assert dry_run(NO_WEIGHTS, random_weights=True).warnings == ()


STEPS_OF_AN_ENGINE = """
import pathlib, sys, torch
package = pathlib.Path("deepspeed/runtime")
package.mkdir(parents=True, exist_ok=True)
(package / "engine.py").write_text('''
class DeepSpeedEngine:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def _take_model_step(self, skips):
        for _ in range(0 if skips else 2):  # once a parameter group
            self.optimizer.step()
''')
sys.path.insert(0, str(pathlib.Path.cwd()))
from deepspeed.runtime.engine import DeepSpeedEngine
weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
engine = DeepSpeedEngine(torch.optim.SGD([weight]))
for number in range(5):
    engine._take_model_step(skips=number == 0)
    print("after", number)
"""


def test_steps_of_a_deepspeed_engine_count_once(ended: dict[str, Ended]) -> None:
    """ZeRO updates each parameter group by a call of the optimizer; an overflow skips a step."""
    assert ended["engine"].run.processes[0].steps == 4


@pytest.mark.long
def test_a_deepspeed_engine_stops_after_steps(dry_run: Script) -> None:
    stopped = dry_run(STEPS_OF_AN_ENGINE, steps=3)

    assert (stopped.outcome, stopped.processes[0].steps) == (STOPPED, 3)
