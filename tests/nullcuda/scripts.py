"""Scripts that several tests run on the null device, and what runs them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from memcalc.nullcuda import DryRun, run

Script = Callable[..., DryRun]

# Everyday DDP: one rank of however many there are; at the end `words` is what every rank has said.
TWO_STEPS_OF_DDP = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4096, 4096, bias=False).cuda())
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    model(torch.randn(8, 4096, device="cuda")).sum().backward()
    optimizer.step()
words = [None] * dist.get_world_size()
dist.all_gather_object(words, {"rank": dist.get_rank()})
"""

# Imports modules once, and runs each of several scripts in a fork of that process: MODULES SCRIPT...
LAUNCHER = """
import atexit, gc, importlib, json, os, runpy, sys
for module in sys.argv[1].split(","):
    importlib.import_module(module)
gc.freeze()
codes = {}
for script in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        with open(f"{script}.out", "w") as out:
            os.dup2(out.fileno(), sys.stdout.fileno())
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")
        sys.stdout.flush()
        atexit._run_exitfuncs()  # the report is written here
        os._exit(0)  # Python would take the modules apart, for half a second
    codes[script] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
with open("codes.json", "w") as file:
    json.dump(codes, file)
"""


@dataclass(frozen=True)
class Ended:
    """How one of several scripts ended: its exit code, its standard output, and the dry run with its process alone."""

    code: int
    out: str
    run: DryRun


def run_scripts(scripts: Mapping[str, str], python: str, folder: Path, modules: str = "torch") -> dict[str, Ended]:
    """Run scripts on an H100, each in a process of its own; the modules (a,b) are imported once, for all of them."""
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "launcher.py").write_text(LAUNCHER)
    whole = run([python, "launcher.py", modules, *(f"{name}.py" for name in scripts)], "h100-80gb")
    codes = json.loads((folder / "codes.json").read_text())
    return {
        name: Ended(
            codes[f"{name}.py"],
            (folder / f"{name}.py.out").read_text(),
            replace(whole, processes=tuple(each for each in whole.processes if each.arguments == (f"{name}.py",))),
        )
        for name in scripts
    }
