"""Record the allocations of PyTorch's ring attention on the null device, one rank of a random shape at a time.

    python -m benchmarks.ring_attention PYTHON --seed held-out --count 16

PYTHON is the interpreter of an environment with PyTorch. Appends to a file of benchmarks/recordings/ring-attention: the
sizes that forward and backward allocate (positive) and free (negative), in order. Run it from the repository's root.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

RECORDING = Path(__file__).parent / "recordings" / "ring-attention" / "torch-2.13.0.jsonl"
HEADS = ((8, 8), (8, 4), (16, 2), (32, 8), (8, 1), (12, 12))

STEP = """
import gc, json, sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method

b, h, kv, s, d = map(int, sys.argv[1:6])
dist.init_process_group("nccl")
torch.cuda.set_device(0)
ranks = dist.get_world_size()
mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("cp",))
set_rotate_method(sys.argv[6])
history = torch.cuda.memory._record_memory_history
weights = [torch.nn.Parameter(torch.zeros(b, s, n, d, device="cuda", dtype=torch.bfloat16)) for n in (h, kv, kv)]


def sizes():
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    signs = {"alloc": 1, "free_completed": -1}
    return [signs[each["action"]] * each["size"] for each in trace if each["action"] in signs]


gc.disable()
for step in range(2):  # the first one has what is allocated once
    gc.collect()
    tokens = torch.zeros(1, s * ranks, device="cuda", dtype=torch.int64)
    with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1], no_restore_buffers={tokens}):
        q, k, v = ((each * 1).transpose(1, 2) for each in weights)
        history(max_entries=100_000)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=h != kv)
        forward = sizes()
        history(enabled=None)
        by_token = out.transpose(1, 2).contiguous()
        gradient = torch.ones_like(by_token)
        history(max_entries=100_000)
        found = torch.autograd.grad(by_token, (q, k, v), gradient)
        backward = sizes()
        history(enabled=None)
        del q, k, v, out, by_token, gradient, found
print(json.dumps({"torch": torch.__version__, "forward": forward, "backward": backward}))
"""


def drawn(seed: str, number: int) -> dict[str, object]:
    """A random shape of one rank."""
    draw = random.Random(f"ring-attention/{seed}/{number}")
    heads, kv = draw.choice(HEADS)
    ranks = draw.choice((2, 4, 8))
    return {
        "seed": seed,
        "number": number,
        "b": draw.choice((1, 2, 3)),
        "h": heads,
        "kv": kv,
        "s": draw.choice((512, 1024, 2048, 3072)),
        "d": draw.choice((64, 128, 256)),
        "method": draw.choice(("allgather", "alltoall")),
        "ranks": ranks,
        "rank": draw.randrange(ranks),
    }


def main() -> None:
    """Run the drawn shapes that are not recorded yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", type=Path)
    parser.add_argument("--seed", default="development")
    parser.add_argument("--count", type=int, default=8)
    given = parser.parse_args()
    lines = RECORDING.read_text().splitlines() if RECORDING.exists() else []
    known = {(record["seed"], record["number"]) for record in map(json.loads, lines)}
    for number in range(given.count):
        if (given.seed, number) in known:
            continue
        shape = drawn(given.seed, number)
        words = [str(shape[name]) for name in ("b", "h", "kv", "s", "d", "method")]
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "step.py"
            script.write_text(STEP)
            place = ["--world-size", str(shape["ranks"]), "--rank", str(shape["rank"])]
            command = [sys.executable, "-m", "memcalc", "dry-run", "--gpu", "h100-80gb", *place, "--"]
            run = subprocess.run([*command, given.python, script, *words], capture_output=True, text=True, check=False)
        found = next((line for line in (run.stdout + run.stderr).splitlines() if line.startswith('{"torch"')), None)
        assert found is not None, run.stdout + run.stderr
        lines.append(json.dumps(shape | json.loads(found), separators=(",", ":")))
        RECORDING.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
