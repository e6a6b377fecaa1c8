"""Record memory snapshots of small runs that exercise the allocator: test data for memcalc.snapshots.

    memcalc dry-run --gpu a100-80gb -- python benchmarks/record_snapshots.py SCENARIO FOLDER

with a CUDA build of PyTorch, of any release since 2.1; on a GPU without `memcalc dry-run --gpu ... --`. The settings
are those of PYTORCH_CUDA_ALLOC_CONF. tests/snapshots/recorded has what came of it, and its README.md says with which
settings.
"""

from __future__ import annotations

import argparse
import gzip
import os
import pickle
import random
from pathlib import Path
from typing import Any

MIB = 2**20
ENTRIES = 100_000
LIMIT_MIB = 600  # of the runs that are to run out of memory


def main() -> None:
    """Run one scenario and write its snapshot, compressed."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=sorted(SCENARIOS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--entries", type=int, default=ENTRIES, help="how many the history keeps")
    parser.add_argument("--name", default="", help="what the settings are called in the name of the file")
    options = parser.parse_args()

    stacks = "all" if options.scenario == "training" else "python"
    torch.cuda.memory._record_memory_history(max_entries=options.entries, stacks=stacks)  # noqa: SLF001 - documented
    kept = SCENARIOS[options.scenario](torch)  # alive until the snapshot is taken
    snapshot = torch.cuda.memory._snapshot()  # noqa: SLF001 - what _dump_snapshot writes
    release = torch.__version__.partition("+")[0]
    name = "-".join(filter(None, (options.scenario, options.name, release)))
    path = options.folder / f"{name}.pickle.gz"
    path.write_bytes(gzip.compress(pickle.dumps(without_home(snapshot)), 9, mtime=0))
    print(path, path.stat().st_size, len(kept))


def training(torch: Any) -> list[Any]:
    """Four steps of a small model, which keeps a tensor of each: a leak."""
    layers = [(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)) for _ in range(2)]
    model = torch.nn.Sequential(*(module for layer in layers for module in layer)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []
    for _ in range(4):
        inputs = torch.zeros(64, 256, device="cuda")
        outputs = model(inputs)
        kept.append(outputs.detach().clone())
        torch.nn.functional.mse_loss(outputs, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
    return kept


def shuffled(torch: Any, operations: int = 600) -> list[Any]:
    """Tensors of all sizes on two streams, freed in random order, the cache emptied at times, and too much wanted."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(LIMIT_MIB * MIB / total)
    generator = random.Random(7)
    side = torch.cuda.Stream()
    alive: list[Any] = []
    for _ in range(operations):
        choice = generator.random()
        if choice < 0.02:
            torch.cuda.empty_cache()
        elif choice < 0.5 or not alive:
            size = int(2 ** generator.uniform(4, 27))
            try:
                with torch.cuda.stream(side if generator.random() < 0.2 else torch.cuda.default_stream()):
                    tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            except torch.cuda.OutOfMemoryError:
                alive = alive[len(alive) // 2 :]
                continue
            if generator.random() < 0.1:
                tensor.record_stream(side)
            alive.append(tensor)
            del tensor
        else:
            alive.pop(generator.randrange(len(alive)))
    return alive


SCENARIOS = {"training": training, "shuffled": shuffled}


def without_home(value: Any) -> Any:
    """The snapshot with the paths of this machine cut to what says something, frames shared as before."""
    seen: dict[int, Any] = {}

    def convert(found: Any) -> Any:
        if id(found) in seen:
            return seen[id(found)]
        if isinstance(found, dict):
            if "filename" in found:
                name = found["filename"]
                for mark in ("site-packages/", f"lib{os.sep}python3", "benchmarks/"):
                    if mark in name:
                        name = mark + name.rpartition(mark)[2]
                result: Any = {**found, "filename": name}
            else:
                result = {key: convert(item) for key, item in found.items()}
        elif isinstance(found, list):
            result = [convert(item) for item in found]
        else:
            return found
        seen[id(found)] = result
        return result

    return convert(value)


if __name__ == "__main__":
    main()
