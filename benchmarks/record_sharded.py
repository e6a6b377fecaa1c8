"""Run a rank of FSDP2, DDP, DeepSpeed or DTensor, or one GPU, on the null CUDA device; append what it held by phase.

    python benchmarks/record_sharded.py known h100-80gb PYTHON benchmarks/recordings/sharded/FILE.jsonl
    python benchmarks/record_sharded.py known cuda PYTHON benchmarks/recordings/gpu/new/FILE.jsonl
    python benchmarks/record_sharded.py pipelines h100-80gb PYTHON FILE.jsonl --nccl --only schedule=interleaved

`cuda` is this machine's GPU: cases then run side by side, as many as its memory has room for. PYTHON is an
interpreter with PyTorch's CUDA build (and DeepSpeed, or torchao and Triton, for their cases). The other ranks are
PyTorch's fake process group: collectives return at once, buffers are real. It references no tensors. With `--nccl` the
process group is NCCL's, with its library replaced as in `memcalc dry-run --world-size`; it references what is sent
until the program waits for it. Cases are lists in sharded_cases.yaml, with commas between their names; recorded ones
are skipped. The step is the reference decoder's (memcalc/step); the engine is put around it as its documentation says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Condition
from typing import Any

CASES = Path(__file__).with_name("sharded_cases.yaml")
STEPS = 3
GPU = "cuda"  # this machine's GPU in place of a simulated one
READY = "ready\n"  # what a case prints once its packages are loaded; it then waits for a line
MARGIN = 2**29  # bytes that are added to an estimate
RANK = "rank="  # a word of a case: which of the ranks it is, if not the first


def main() -> None:
    """Parse the command line, then run one case (inside) or all of them (outside)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", help="lists in sharded_cases.yaml, with commas between them")
    parser.add_argument("card")
    parser.add_argument("python")
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--case", help="run this one here, on whatever CUDA device is there")
    parser.add_argument("--outside", type=int, default=0, help="bytes to hold beside PyTorch, as NCCL would")
    parser.add_argument("--delayed-events", action="store_true", help="of `memcalc dry-run`; steps begin by waiting")
    parser.add_argument("--nccl", action="store_true", help="NCCL's process group in place of the fake one")
    parser.add_argument("--only", default="", help="run only the cases with this word")
    parser.add_argument("--wait", action="store_true", help="with --case: load the packages, then wait for a line")
    arguments = parser.parse_args()
    if arguments.case is not None:
        if arguments.wait:
            load_packages(arguments.case)
            print(READY, end="", flush=True)
            sys.stdin.readline()
        hold_outside(arguments.outside)
        backend = "nccl" if arguments.nccl else "fake"
        run(arguments.case, arguments.card, arguments.recordings, delayed=arguments.delayed_events, backend=backend)
        return
    import yaml

    from memcalc.nullcuda import run as dry_run
    from memcalc.nullcuda.options import Options

    known = recorded(arguments.recordings)
    lists = yaml.safe_load(CASES.read_text())
    named = dict.fromkeys(case for name in arguments.cases.split(",") for case in lists[name])
    cases = [case for case in named if case not in known and (not arguments.only or arguments.only in case.split())]
    command = [arguments.python, *sys.argv, "--case"]
    if arguments.card == GPU:
        side_by_side(cases, command)
        return
    for case in cases:
        options: Options = {"delayed_events": arguments.delayed_events}
        if arguments.nccl:
            spec, rank = spec_of(case)
            options |= {"world_size": spec.parallelism.ranks, "rank": rank}
        ran = dry_run([*command, case], arguments.card, timeout=600, stdout=subprocess.DEVNULL, **options)
        print(f"{case}: {ran.outcome}", flush=True)


def side_by_side(cases: Sequence[str], command: Sequence[str]) -> None:
    """Run cases on this machine's GPU, each once there is room for what it is estimated to need."""
    free, change = gpu_bytes() - MARGIN, Condition()

    def run_case(case: str) -> None:
        nonlocal free
        needed = estimated_bytes(case)
        process = subprocess.Popen([*command, case, "--wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        while process.stdout.readline() not in {READY, ""}:
            pass
        with change:
            change.wait_for(lambda: free >= needed)
            free -= needed
        process.communicate("\n")
        with change:
            free += needed
            change.notify_all()
        print(f"{case}: exit code {process.returncode}", flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run_case, cases))


def gpu_bytes() -> int:
    """The memory of this machine's GPU."""
    words = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[0]) << 20


def estimated_bytes(case: str) -> int:
    """The device memory that a case is estimated to need, and some more; at most what a GPU of its own has."""
    from memcalc.spec.loading import load
    from memcalc.verdict.needs import need_of

    preset, *words = case.split()
    found = need_of(load(preset, [word for word in words if not word.startswith(RANK)]), None)
    return min(int((found.reserved_bytes + found.outside_bytes) * 1.05) + MARGIN, gpu_bytes() - MARGIN)


def recorded(recordings: Path) -> set[str]:
    """The cases that have a record."""
    if not recordings.exists():
        return set()
    return {json.loads(line)["case"] for line in recordings.read_text().splitlines()}


def load_packages(case: str) -> None:
    """Import what takes longest, none of which starts CUDA; nothing where PyTorch is yet to read its settings."""
    if "alloc_conf=" in case:
        return
    import torch.distributed.fsdp  # noqa: F401

    import memcalc.step.loop  # noqa: F401

    if "engine=deepspeed" in case:
        import deepspeed  # noqa: F401


def hold_outside(size: int) -> None:
    """Take bytes of the device for as long as the process lives: NCCL's, where the fake process group counts none."""
    import ctypes

    import torch

    if size:
        torch.cuda.set_device(0)
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
        failed = runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(size))
        assert not failed, f"cudaMalloc of {size} bytes: error {failed}"


def spec_of(case: str) -> tuple[Any, int]:
    """The run of a case, and which of its ranks it is."""
    from memcalc.spec.loading import load

    preset, *words = case.split()
    rank = next((int(word.removeprefix(RANK)) for word in words if word.startswith(RANK)), 0)
    return load(preset, [word for word in words if not word.startswith(RANK)]), rank


def run(case: str, card: str, recordings: Path, *, delayed: bool = False, backend: str = "fake") -> None:
    """Run one case as one rank of all, and append its record."""
    spec, rank = spec_of(case)
    ranks = spec.parallelism.ranks
    if spec.training.alloc_conf:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = spec.training.alloc_conf
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
    os.environ.setdefault("MASTER_PORT", "29400")
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.cuda.set_device(0)
    store = FakeStore() if backend == "fake" else None
    dist.init_process_group(backend, rank=rank, world_size=ranks, store=store)
    phases = Phases(waits=delayed)
    runner = deepspeed if ranks > 1 and spec.parallelism.engine == "deepspeed" else pytorch
    if spec.parallelism.pipeline_parallel > 1:
        from benchmarks.pipelined import pipelined

        pipelined(spec, phases, stage_of(spec, rank), STEPS)
    else:
        runner(spec, phases)
    record = {
        "case": case,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if card == GPU else f"null:{card}",
        "versions": {
            "torch": torch.__version__,
            **({"deepspeed": version("deepspeed")} if runner is deepspeed else {}),
            **({"torchao": version("torchao")} if uses_torchao(spec.training) else {}),
        },
        **({"process_group": backend} if backend != "fake" else {}),
        **({"events": "delayed, at most until the step ends"} if delayed else {}),
        "spec": spec.model_dump(mode="json"),
        "phases": phases.found,
        "requested": phases.requested,
        "reserved": phases.reserved,
        **({"pinned_bytes": pinned_bytes()} if spec.parallelism.offload != "none" else {}),
        **({"pinned_bytes": pinned_peak()} if spec.training.offload_activations != "none" else {}),
    }
    recordings.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record, separators=(",", ":")) + "\n"
    with recordings.open("ab", buffering=0) as file:  # one write: others may be writing
        file.write(line.encode())


def stage_of(spec: Any, rank: int) -> int:
    """The pipeline stage of a rank: neighboring ranks share a stage (Megatron-LM core/parallel_state.py)."""
    return rank * int(spec.parallelism.pipeline_parallel) // int(spec.parallelism.ranks)


def uses_torchao(training: Any) -> bool:
    """Whether torchao multiplies in 8 bits, or updates parameters."""
    return bool(training.fp8 != "none" or training.optimizer == "adam-4bit")


def version(package: str) -> str:
    """The installed version of a package."""
    from importlib.metadata import version as installed

    return installed(package)


def pinned_bytes() -> int:
    """What of the host's memory is pinned and in use after the last step: its gradients still are."""
    import torch

    return int(torch.cuda.host_memory_stats()["active_bytes.current"])


def pinned_peak() -> int:
    """The most that was pinned and in use: activations are there between forward and backward."""
    import torch

    return int(torch.cuda.host_memory_stats()["active_bytes.peak"])


class Phases:
    """Peaks of allocated, requested and reserved bytes, phase by phase.

    Args:
        waits: the host waits for the GPU before each step, as programs do that read the loss.
    """

    def __init__(self, *, waits: bool = False) -> None:
        self.waits = waits
        self.found: dict[str, int] = {}
        self.requested: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        self.around: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around each phase, or a phase within it; of micro-batches the highest counts."""
        import torch

        if self.waits and name.startswith("zero_grad"):
            torch.cuda.synchronize()
        if self.around:
            self._note(self.around[-1])
        torch.cuda.reset_peak_memory_stats()
        self.around.append(name)
        yield
        self._note(self.around.pop())
        torch.cuda.reset_peak_memory_stats()

    def _note(self, name: str) -> None:
        import torch

        self.found[name] = max(self.found.get(name, 0), torch.cuda.max_memory_allocated())
        asked = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        self.requested[name] = max(self.requested.get(name, 0), asked)
        self.reserved[name] = max(self.reserved.get(name, 0), torch.cuda.max_memory_reserved())


def pytorch(spec: Any, phases: Phases) -> None:
    """DDP, FSDP2, DTensor or one GPU: the step as `memcalc measure` runs it."""
    import torch

    from memcalc.step.loop import TrainingRun

    TrainingRun(spec, torch.device("cuda", 0)).execute(STEPS, phases)


ZERO_SETTINGS = {  # of DeepSpeed's config, by field of the run
    "reduce_bucket_size": "reduce_bucket_size",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "overlap_comm": "overlap_comm",
}
# What DeepSpeed does with such a model, whatever its config says.
NO_SETTINGS = {"copies_fp32_weights", "casts_fp32_weights"}


def zero_settings(spec: Any) -> dict[str, Any]:
    """The settings of ZeRO that the run names; a field that DeepSpeed's config lacks is rejected."""
    named = spec.parallelism.zero_optimization.model_dump(exclude_defaults=True, exclude=NO_SETTINGS)
    if unknown := named.keys() - ZERO_SETTINGS.keys():
        raise SystemExit(f"this recorder has no setting for {', '.join(sorted(unknown))}")
    return {ZERO_SETTINGS[name]: value for name, value in named.items()}


def offloaded(spec: Any) -> dict[str, Any]:
    """DeepSpeed's words for what is on the host."""
    where = {"device": "cpu", "pin_memory": spec.parallelism.offload_pin_memory}
    optimizer, parameters = ("offload_optimizer",), ("offload_param",)
    words = {"optimizer": optimizer, "parameters": parameters, "all": optimizer + parameters}
    return dict.fromkeys(words[spec.parallelism.offload], where) if spec.parallelism.offload in words else {}


def deepspeed(spec: Any, phases: Phases) -> None:
    """ZeRO with DeepSpeed's defaults, in 16 bits or fp32, and the optimizer handed over.

    Gradients of 16-bit weights are summed in 16 bits (recipe mixed-16), or in fp32 (mixed-20).
    """
    import deepspeed as ds
    import torch
    import torch._dynamo  # what it inspects, zero.Init replaces

    from memcalc.spec.training import TOKENWISE
    from memcalc.step.causal_lm import build
    from memcalc.step.optimizers import build_optimizer  # its last argument names what Muon would take

    stage = spec.parallelism.zero_stage
    config = {
        "train_micro_batch_size_per_gpu": spec.training.micro_batch_size,
        "gradient_accumulation_steps": spec.training.gradient_accumulation_steps,
        **({spec.training.dtype: {"enabled": True}} if spec.training.recipe in {"mixed-16", "mixed-20"} else {}),
        **({"data_types": {"grad_accum_dtype": "fp32"}} if spec.training.recipe == "mixed-20" else {}),
        "zero_optimization": {"stage": stage} | zero_settings(spec) | offloaded(spec),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own is compiled on the way
    }
    with phases.phase("model"):
        if stage == 3 and spec.training.finetune != "qlora":  # 4 bits are made on the device, and then split
            with ds.zero.Init(config_dict_or_path=config):
                model = build(spec, torch.device("cuda", 0))
        else:
            model = build(spec, torch.device("cuda", 0))
    with phases.phase("optimizer"):
        optimizer = build_optimizer(spec.training, list(model.module.parameters()), [])
        engine, *_ = ds.initialize(model=model.module, optimizer=optimizer, config=config)
    with model.contexts():  # the kernel of attention
        # A loss that reads the LM head's weight gets hidden states; only stage 3 has hooks around the model.
        forward = model.logits if spec.training.loss in TOKENWISE else engine
        train(spec, phases, engine, forward, model.loss)


def train(spec: Any, phases: Phases, engine: Any, forward: Any, loss_of: Any) -> None:
    """The loop of memcalc/step/loop.py in DeepSpeed's words, who wants a step after every micro-batch."""
    import torch

    device = torch.device("cuda", 0)
    shape = (spec.training.micro_batch_size, spec.training.sequence_length)
    with phases.phase("input"):
        ids, labels = (torch.randint(spec.model.vocab_size, shape, device=device) for _ in range(2))
    for step in range(1, STEPS + 1):
        with phases.phase(f"zero_grad_{step}"):
            engine.optimizer.zero_grad()
        for _ in range(spec.training.gradient_accumulation_steps):
            with phases.phase(f"forward_{step}"):
                found = forward(ids)
                logits = getattr(found, "logits", found)  # transformers' models return more
                del found
            with phases.phase(f"loss_{step}"):
                loss = loss_of(logits, labels)
            with phases.phase(f"backward_{step}"):
                engine.backward(loss)
                logits = None
                del loss
            with phases.phase(f"optimizer_step_{step}"):
                engine.step()


if __name__ == "__main__":
    main()
