"""How quick the null CUDA device is: building it, starting on it, and training steps.

    python benchmarks/nullcuda.py .venv-null/bin/python

The interpreter named has PyTorch's CUDA build, and transformers. Steps and commands are measured in seconds of the
processor. Bars: 15 s to build from nothing; 0.3 s more than `import torch` to
start; 20 ms for a step of GPT-2 small, 100 ms for one of Llama-3-8B, under 5 s for the whole command.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from memcalc.nullcuda import DryRun, environment, run
from memcalc.nullcuda.build import device_folder
from memcalc.nullcuda.result import DONE
from memcalc.nullcuda.torch_build import find_torch

TRIES = 5

# A decoder of this many layers, sizes and bytes per parameter, with fused attention and a fused optimizer.
STEP = """
import sys, torch, torch.nn.functional as F
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
train(lambda: F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()))
"""

# The same of transformers' own classes, at their published sizes.
TRANSFORMERS_STEP = """
import sys, torch, transformers
wide = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
config, s = {
    "gpt2": (transformers.GPT2Config(), 1024),
    "llama": (transformers.LlamaConfig(vocab_size=128256, num_key_value_heads=8, **wide), 2048),
}[sys.argv[1]]
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(50000, (1, s))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
train(lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss)
"""

# Seconds of the processor, all threads together: others may be at work on the machine.
TRAIN = """
import time
def train(loss):
    times = []
    for _ in range(6):
        start = time.process_time()
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - start)
    print(min(times), sum(times) / len(times))
"""
SIZES = {"GPT-2 small": "12 768 12 12 3072 50257 1024", "Llama-3-8B": "32 4096 32 8 14336 128256 2048"}
MODELS = {"transformers' GPT-2 small": "gpt2", "transformers' Llama-3-8B": "llama"}
STEPS = {name: (STEP, words) for name, words in SIZES.items()}
STEPS |= {name: (TRANSFORMERS_STEP, words) for name, words in MODELS.items()}


class Timed(NamedTuple):
    """One model's steps: seconds of the processor for the quickest and the mean step and for the whole command."""

    quickest: float
    mean: float
    command: float
    found: DryRun


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
        for name in STEPS:
            timed = time_step(python, name, "b200", Path(folder))
            print(
                f"{name}: step {1000 * timed.quickest:.1f} ms (mean {1000 * timed.mean:.1f}), "
                f"whole command {timed.command:.2f} s, peak {timed.found.allocated_bytes:,} bytes"
            )


def quickest(python: str, variables: dict[str, str]) -> float:
    """Seconds of the quickest of several imports of torch."""
    times = []
    for _ in range(TRIES):
        start = time.perf_counter()
        subprocess.run([python, "-c", "import torch"], env=variables, check=True)
        times.append(time.perf_counter() - start)
    return min(times)


def time_step(python: str, name: str, card: str, folder: Path) -> Timed:
    """Run one model's steps.

    Raises:
        RuntimeError: they did not end well.
    """
    script, words = STEPS[name]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / "out").open("w+") as out:
        found = run([python, "-c", TRAIN + script, *words.split()], card, stdout=out)
        out.seek(0)
        if found.outcome != DONE:
            raise RuntimeError(f"{name}: {found.outcome}")
        quickest, mean = map(float, out.read().split()[-2:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Timed(quickest, mean, spent, found)


if __name__ == "__main__":
    main()
