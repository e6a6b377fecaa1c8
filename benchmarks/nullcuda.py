"""How quick the null CUDA device is: building it, starting on it, and training steps.

    python benchmarks/nullcuda.py .venv-null/bin/python

The interpreter named has PyTorch's CUDA build. Bars: 15 s to build from nothing; 0.3 s more than `import torch` to
start; 20 ms for a step of GPT-2 small, 100 ms for one of Llama-3-8B, under 5 s for the whole command.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path

from memcalc.nullcuda import environment, run
from memcalc.nullcuda.build import device_folder
from memcalc.nullcuda.torch_build import find_torch

TRIES = 5

# A decoder of this many layers, sizes and bytes a parameter, with fused attention and a fused optimizer.
STEP = """
import sys, time, torch, torch.nn.functional as F
layers, d, heads, kv_heads, hidden, vocab, s = map(int, sys.argv[1:])
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = torch.nn.RMSNorm(d), torch.nn.RMSNorm(d)
        self.q, self.o = torch.nn.Linear(d, d, bias=False), torch.nn.Linear(d, d, bias=False)
        self.k, self.v = (torch.nn.Linear(d, d // heads * kv_heads, bias=False) for _ in range(2))
        self.gate, self.up = (torch.nn.Linear(d, hidden, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(hidden, d, bias=False)
    def forward(self, x):
        y = self.n1(x)
        q, k, v = (p(y).view(1, s, -1, d // heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads < heads)
        x = x + self.o(a.transpose(1, 2).reshape(1, s, d))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = torch.nn.Sequential(torch.nn.Embedding(vocab, d), *[Block() for _ in range(layers)],
                                torch.nn.RMSNorm(d), torch.nn.Linear(d, vocab, bias=False))
    tokens = torch.randint(vocab, (1, s))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
times = []
for _ in range(10):
    start = time.perf_counter()
    F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter() - start)
print(min(times), sum(times) / len(times))
"""
SIZES = {"GPT-2 small": "12 768 12 12 3072 50257 1024", "Llama-3-8B": "32 4096 32 8 14336 128256 2048"}


def main() -> None:
    """Parse the command line, then time everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="an interpreter with PyTorch's CUDA build")
    python = os.path.abspath(parser.parse_args().python)  # noqa: PTH100 -- resolve() would leave the environment
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        torch = find_torch([python])
        start = time.perf_counter()
        device_folder(torch)
        print(f"build from nothing for torch {torch.version}: {time.perf_counter() - start:.2f} s")
        start = time.perf_counter()
        variables = os.environ | environment("b200", pythons=[python])
        print(f"find it again: {time.perf_counter() - start:.3f} s")
        without = {name: value for name, value in variables.items() if name != "PYTHONPATH"}
        plain, watched = quickest(python, without), quickest(python, variables)
        print(f"import torch: {plain:.2f} s; with the device's hook: {watched - plain:+.3f} s")
        for name, sizes in SIZES.items():
            time_step(python, name, sizes, Path(folder))


def quickest(python: str, variables: dict[str, str]) -> float:
    """Seconds of the quickest of several imports of torch."""
    times = []
    for _ in range(TRIES):
        start = time.perf_counter()
        subprocess.run([python, "-c", "import torch"], env=variables, check=True)
        times.append(time.perf_counter() - start)
    return min(times)


def time_step(python: str, name: str, sizes: str, folder: Path) -> None:
    """Run one model's step, and print its time and its peak."""
    with (folder / "out").open("w+") as out:
        result = run([python, "-c", STEP, *sizes.split()], "b200", stdout=out)
        out.seek(0)
        quickest_step, mean = map(float, out.read().split()[-2:])
    print(
        f"{name}: step {1000 * quickest_step:.1f} ms (mean {1000 * mean:.1f}), whole command {result.seconds:.2f} s, "
        f"peak {result.allocated_bytes:,} bytes"
    )


if __name__ == "__main__":
    main()
