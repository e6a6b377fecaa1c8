"""Sample runs near their card and record on the null CUDA device whether PyTorch gets through.

    python benchmarks/verdict_runs.py draw SEED COUNT > cases.txt       # runs with an estimate within 12 % of the GPU
    python benchmarks/verdict_runs.py largest SEED COUNT > cases.txt    # each run at the largest micro-batch and above
    python benchmarks/verdict_runs.py ranks SEED COUNT > cases.txt      # one rank of many, within 12 % of the GPU
    python benchmarks/verdict_runs.py generations SEED COUNT > cases.txt    # generations, within 12 % of the GPU
    python benchmarks/verdict_runs.py record cases.txt PYTHON FILE.jsonl
    python benchmarks/verdict_runs.py record cases.txt python3 FILE.jsonl --cuda    # on this machine's GPU

With --gpu the drawn runs are of that GPU alone. The runs are whole models as users train them: presets, cards,
recipes, implementations, optimizers, adapters. PYTHON is an interpreter with PyTorch's CUDA build. Recorded cases are
skipped; each is three steps in a process of its own, and one that runs out of memory is recorded as such.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import memcalc
from benchmarks.record_generation import generate_each
from benchmarks.record_reference import variables_of
from benchmarks.record_sharded import GPU as THIS_GPU
from benchmarks.record_sharded import RANK
from benchmarks.sample_cases import WHOLE
from memcalc.errors import InputError, MemcalcError, OutOfMemory
from memcalc.estimation.max_batch import with_sizes
from memcalc.estimation.outside_allocator import communication_library_bytes
from memcalc.measuring import measure
from memcalc.measuring.client import WORKER, Worker
from memcalc.measuring.measurement import DONE, OUT_OF_MEMORY
from memcalc.nullcuda import run as dry_run
from memcalc.nullcuda.context import null_device
from memcalc.search.maxima import maximum
from memcalc.spec.model_families.conversion import attends_eagerly
from memcalc.spec.model_families.inverse import write_hf_config
from memcalc.spec.spec import Spec
from memcalc.step.reference.decoder import refuse_unsupported
from memcalc.units import largest_that_fits
from memcalc.verdict.judge import is_expected_to_fit
from memcalc.verdict.needs import can_replay, need_of

NEAR = 0.12  # of the GPU's usable memory
CARDS = ("a10g", "rtx-4090", "a100-40gb", "rtx-a6000", "a100-80gb", "a100-80gb", "h100-80gb", "h100-80gb", "h200")
PRESETS = (
    "gpt2 gpt2-medium gpt2-large gpt2-xl codegen-350m codegen-2b llama-3.2-1b llama-3.2-3b llama-3-8b qwen2.5-0.5b "
    "qwen2.5-7b qwen3-0.6b qwen3-8b qwen3-4b mistral-7b gemma-2b opt-1.3b pythia-1.4b phi-2"
).split()
LENGTHS = (512, 1024, 1024, 2048, 2048, 4096, 8192, 1536, 1000)
RECIPES = ("pure", "pure", "amp", "mixed-16", "mixed-18", "mixed-20", "fp32")
OPTIMIZERS = (
    *["optimizer=adamw optimizer_implementation=fused"] * 3,
    *["optimizer=adamw optimizer_implementation=foreach"] * 3,
    "optimizer=adamw optimizer_implementation=for-loop",
    "optimizer=sgd",
    "optimizer=momentum optimizer_implementation=foreach",
    "optimizer=adafactor optimizer_implementation=for-loop",
    "optimizer=lion optimizer_implementation=foreach",
    "optimizer=adam-8bit optimizer_implementation=for-loop",
)
ADAPTERS = (
    *[""] * 8,
    "lora.rank=16",
    "lora.rank=64 lora.target_modules=all-linear",
    "lora.rank=16 qlora.block_size=64",
)
GENERATING = (*PRESETS, *"gemma-2-2b gemma-3-1b granite-3.1-2b stablelm-2-1.6b starcoder2-3b smollm3-3b".split())
GENERATING += ("olmo-2-7b", "command-r7b", "glm-4-9b", "falcon-7b")
MOST_BATCH = 4096
RANKS_CARDS = ("a100-80gb", "h100-80gb")
SHARDINGS = (
    "engine=ddp",
    "engine=fsdp2 zero_stage=2",
    "engine=fsdp2 zero_stage=3",
    "engine=fsdp2 zero_stage=3",
    "engine=fsdp2 zero_stage=3 tensor_parallel=4 sequence_parallel=true",
    "engine=deepspeed zero_stage=1",
    "engine=deepspeed zero_stage=2",
    "engine=deepspeed zero_stage=3",
)
DEEPSPEED_RECIPES = ("mixed-16", "mixed-20")
PYTORCH_RECIPES = ("pure", "amp", "fp32", "mixed-16", "mixed-20", "mixed-20", "mixed-18")


def drawn(lot: random.Random, cards: Sequence[str]) -> Spec | None:
    """A run on one of some GPUs, without its micro-batch; None: these settings do not go together."""
    recipe = lot.choice(RECIPES)
    kernels = ["eager", "memory-efficient", *(["flash"] * 3 if recipe != "fp32" else [])]
    words = [
        f"s={lot.choice(LENGTHS)}",
        f"recipe={recipe}",
        f"implementation={lot.choice(['plain', 'huggingface'])}",
        f"attention={lot.choice(kernels)}",
        f"recompute={lot.choice(['none', 'none', 'full', 'full', 'every-2'])}",
        f"loss={lot.choice(['materialized', 'materialized', 'materialized', 'chunked'])}",
        f"dropout={lot.choice([0, 0, 0.1])}",
        *lot.choice(OPTIMIZERS).split(),
        *lot.choice(ADAPTERS).split(),
    ]
    if lot.random() < 0.2:
        words.append(f"gradient_accumulation_steps={lot.choice([2, 4])}")
    try:
        spec = memcalc.load(lot.choice(PRESETS), *words, gpu=lot.choice(cards))
        refuse_unsupported(spec)
    except InputError:
        return None
    return spec if can_replay(spec) and _in_transformers(spec) else None


def _in_transformers(spec: Spec) -> bool:
    if spec.training.implementation != "huggingface":
        return True
    grouped = spec.model.num_key_value_heads < spec.model.num_attention_heads
    if spec.training.attention == "memory-efficient" and grouped:
        return False
    return spec.model.architecture != "codegen" or spec.training.attention == "eager"


def near_their_card(lot: random.Random, count: int, cards: Sequence[str]) -> Iterator[str]:
    """Runs with a micro-batch at which the estimate is within NEAR of the GPU."""
    while count:
        spec = drawn(lot, cards)
        batches = [] if spec is None else near_batches(spec)
        if batches and spec is not None:
            count -= 1
            yield case(spec, lot.choice(batches))


def near_batches(spec: Spec) -> list[int]:
    """Micro-batches at which device memory is within NEAR of what is usable, of those around the largest that fits."""
    card = spec.gpu
    assert card is not None
    largest = largest_batch(spec)
    if largest is None:
        return []
    span = range(max(1, int(largest * 0.8)), int(largest * 1.25) + 2)
    tried = span if len(span) <= 16 else [span[int(place * (len(span) - 1) / 15)] for place in range(16)]
    found = []
    for batch in tried:
        needed = need_of(with_batch(spec, batch), card).device_bytes
        if abs(needed / card.usable_bytes - 1) <= NEAR:
            found.append(batch)
    return found


def largest_batch(spec: Spec) -> int | None:
    """The largest batch with a replay that gets through; None: none fits, or it is too large to be run quickly."""
    if spec.inference is not None:
        found = largest_that_fits(lambda batch: is_expected_to_fit(with_batch(spec, batch)), MOST_BATCH)
        return found if 0 < found < MOST_BATCH else None
    try:
        found = maximum("micro_batch_size", spec).value
    except InputError:
        return None
    return found if 0 < found <= MOST_BATCH else None


def with_batch(spec: Spec, batch: int) -> Spec:
    """The run with another batch."""
    if spec.inference is not None:
        return with_sizes(spec, batch_size=batch)
    return spec.with_training(micro_batch_size=batch)


def near_generations(lot: random.Random, count: int, cards: Sequence[str]) -> Iterator[str]:
    """Generations by whole models, with a batch at which device memory is within NEAR of what is usable."""
    while count:
        words = [
            f"prompt_length={lot.choice([17, 100, 500, 1024, 2048, 4096, 8192])}",
            f"new_tokens={lot.choice([1, 16, 33, 64])}",
            f"dtype={lot.choice(['bf16', 'bf16', 'bf16', 'fp16', 'fp32'])}",
            f"quantization={lot.choice(['none', 'none', 'none', 'nf4'])}",
            f"cache={lot.choice(['dynamic', 'dynamic', 'static'])}",
            f"program={lot.choice(['generate', 'generate', 'loop'])}",
            f"attention={lot.choice(['flash', 'flash', 'eager', 'memory-efficient'])}",
        ]
        try:
            spec = memcalc.load(lot.choice(GENERATING), *(f"inference.{word}" for word in words), gpu=lot.choice(cards))
        except InputError:
            continue
        sdpa = spec.training.attention != "eager" and not attends_eagerly(spec.model.architecture, "huggingface")
        if can_replay(spec) and (sdpa or spec.training.attention == "eager") and (batches := near_batches(spec)):
            count -= 1
            words.insert(0, f"batch_size={lot.choice(batches)}")
            yield " ".join([spec.name, f"gpu={spec.hardware.gpu}", *(f"inference.{word}" for word in words)])


def largest_and_above(lot: random.Random, count: int, cards: Sequence[str]) -> Iterator[str]:
    """Runs at the largest micro-batch that `fit` names, and at the next larger one."""
    while count:
        spec = drawn(lot, cards)
        largest = None if spec is None else largest_batch(spec)
        if largest is not None and spec is not None:
            count -= 1
            yield case(spec, largest)
            yield case(spec, largest + 1)


FIELDS = (
    "sequence_length recipe implementation attention recompute loss dropout optimizer optimizer_implementation "
    "gradient_accumulation_steps"
).split()


def case(spec: Spec, batch: int) -> str:
    """A run as `memcalc measure` takes it: the preset, the GPU, and words of --set."""
    training = spec.training
    words = [f"gpu={spec.hardware.gpu}", f"b={batch}", *(f"{name}={getattr(training, name)}" for name in FIELDS)]
    if training.lora is not None:
        modules = training.lora.target_modules
        named = modules if isinstance(modules, str) else f"[{','.join(modules)}]"
        words += [f"lora.rank={training.lora.rank}", f"lora.target_modules={named}"]
    if training.qlora is not None:
        words.append(f"qlora.block_size={training.qlora.block_size}")
    return " ".join([spec.name, *words])


def loaded(line: str) -> Spec:
    """The run of a case, of which rank=K names the recorded rank, if it is not the first."""
    preset, gpu, *words = shlex.split(line)
    spec = memcalc.load(preset, *(word for word in words if not word.startswith(RANK)), gpu=gpu.removeprefix("gpu="))
    if spec.training.framework is None:
        return spec
    # Models by hub id are those of a framework's program, but recorded is memcalc's own step.
    return spec.with_training(framework=None)


def record(cases: Path, python: str, recordings: Path, device: str | None) -> None:
    """Run the cases that have no record yet: each on its own GPU, simulated, or all on this machine's (THIS_GPU)."""
    known = set()
    if recordings.exists():
        known = {json.loads(line)["case"] for line in recordings.read_text(encoding="utf-8").splitlines()}
    recordings.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for line in cases.read_text(encoding="utf-8").split("\n"):
            if not line or line in known:
                continue
            spec = loaded(line)
            card = device or spec.hardware.gpu or ""
            if spec.inference is not None:
                found = {"case": line, **outcome_of_generation(spec, python, card)}
            elif spec.parallelism.ranks > 1:
                found = {"case": line, **outcome_of_rank(line, python, card)}
            else:
                if card not in workers:
                    workers[card] = stack.enter_context(Worker((python, *WORKER), variables_of(card, python)))
                found = {"case": line, **outcome(spec, workers[card])}
            with recordings.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            print(line, found["outcome"], file=sys.stderr, flush=True)


def near_ranks(lot: random.Random, count: int, cards: Sequence[str], wanted: Sequence[str] = ()) -> Iterator[str]:
    """One rank of 2 to 64, at a micro-batch at which device memory is within NEAR of what is usable."""
    while count:
        sharding = lot.choice(SHARDINGS)
        recipe = lot.choice(DEEPSPEED_RECIPES if "deepspeed" in sharding else PYTORCH_RECIPES)
        words = [
            f"s={lot.choice(LENGTHS)}",
            f"recipe={recipe}",
            f"attention={'memory-efficient' if recipe == 'fp32' else 'flash'}",
            f"recompute={lot.choice(['none', 'full'])}",
            f"optimizer_implementation={lot.choice(['fused', 'foreach'])}",
            f"implementation={'huggingface' if 'tensor' not in sharding and lot.random() < 0.4 else 'plain'}",
            f"gradient_accumulation_steps={lot.choice([1, 1, 1, 2])}",
            *sharding.split(),
            f"data_parallel={lot.choice([2, 8, 8, 64])}",
        ]
        preset, gpu = lot.choice(WHOLE), lot.choice(cards)
        if not {*wanted} <= {*words}:
            continue
        try:
            spec = memcalc.load(preset, *words, gpu=gpu)
            refuse_unsupported(spec)
        except InputError:
            continue
        if not can_replay(spec) or not _in_transformers(spec):
            continue
        batches = near_batches(spec)
        if batches:
            count -= 1
            yield f"{preset} gpu={gpu} b={lot.choice(batches)} {' '.join(words)}"


def outcome_of_rank(line: str, python: str, card: str) -> dict[str, object]:
    """Return the memory of one rank in three steps of record_sharded.py in bytes, and how they ended."""
    preset, _, *words = line.split()
    spec = loaded(line)
    # The null device counts NCCL's buffers at a group's first collective; DDP's reducer asks the fake group for none.
    outside = communication_library_bytes(spec) if spec.parallelism.engine == "ddp" else 0
    script = Path(__file__).with_name("record_sharded.py")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "record.jsonl"
        command = [python, str(script), "-", card, python, str(file)]
        command += ["--case", " ".join([preset, *words]), "--outside", str(outside)]
        ended = here(command) if card == THIS_GPU else dry_run(command, card, timeout=900).outcome
        if not file.exists():
            failed = OUT_OF_MEMORY if ended == OUT_OF_MEMORY else "refused"
            return {"outcome": failed, "communication_bytes": outside, "message": ended}
        record = json.loads(file.read_text(encoding="utf-8"))
    return {
        "outcome": DONE,
        "date": record["date"],
        "versions": record["versions"],
        "allocated_bytes": max(record["phases"].values()),
        "reserved_bytes": max(record["reserved"].values()),
        "communication_bytes": outside,
        "message": "",
    }


def outcome_of_generation(spec: Spec, python: str, card: str) -> dict[str, object]:
    """Return the memory of a generation by record_generation.py in bytes, and how it ended."""
    assert spec.inference is not None
    given = write_hf_config(spec.model), spec.inference.model_dump()
    with null_device(card, python=python, random_weights=True) as device:
        (found,) = device.call(generate_each, [given])
    if isinstance(found, str):
        return {"outcome": OUT_OF_MEMORY if "OutOfMemoryError" in found else "refused", "message": found[:300]}
    return {
        "outcome": DONE,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": found["versions"],
        "allocated_bytes": max(found["phases"].values()),
        "reserved_bytes": found["reserved_bytes"],
        "message": "",
    }


def here(command: list[str]) -> str:
    """How a command ended that uses this machine's GPU."""
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    return OUT_OF_MEMORY if "OutOfMemoryError" in ran.stderr else f"exit code {ran.returncode}: {ran.stderr[-300:]}"


def outcome(spec: Spec, worker: Worker) -> dict[str, object]:
    """Return PyTorch's memory in three steps in bytes, and how they ended."""
    try:
        found = measure(spec, "cuda", steps=3, worker=worker)
    except OutOfMemory as error:
        return {"outcome": OUT_OF_MEMORY, "message": str(error)[:300]}
    except MemcalcError as error:
        return {"outcome": "refused", "message": str(error)[:300]}
    phases = found.phases
    return {
        "outcome": found.outcome,
        "date": found.date,
        "versions": {"torch": found.versions["torch"], "transformers": found.versions.get("transformers", "")},
        "allocated_bytes": max((phase.peak_allocated_bytes for phase in phases), default=0),
        "reserved_bytes": max((phase.peak_reserved_bytes or 0 for phase in phases), default=0),
        "device_bytes": max((phase.device_bytes or 0 for phase in phases), default=0),
        "others_bytes": found.device.others_bytes,
        "message": found.message,
    }


DRAWS: dict[str, Callable[..., Iterator[str]]] = {
    "draw": near_their_card,
    "largest": largest_and_above,
    "ranks": near_ranks,
    "generations": near_generations,
}


def main() -> None:
    """Draw cases, or record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in DRAWS:
        verb = verbs.add_parser(name)
        verb.add_argument("seed", type=int)
        verb.add_argument("count", type=int)
        verb.add_argument("--gpu", help="of all runs")
        if name == "ranks":
            verb.add_argument("--with", dest="wanted", nargs="*", default=[], help="words of all runs: recipe=mixed-20")
    verb = verbs.add_parser("record")
    verb.add_argument("cases", type=Path)
    verb.add_argument("python")
    verb.add_argument("recordings", type=Path)
    verb.add_argument("--cuda", action="store_const", const=THIS_GPU, help="run them on this machine's GPU")
    arguments = parser.parse_args()
    if arguments.verb == "record":
        record(arguments.cases, arguments.python, arguments.recordings, arguments.cuda)
        return
    draws = {
        "draw": near_their_card,
        "largest": largest_and_above,
        "ranks": near_ranks,
        "generations": near_generations,
    }
    draw = draws[arguments.verb]
    cards = [arguments.gpu] if arguments.gpu else RANKS_CARDS if draw is near_ranks else CARDS
    given = {"wanted": arguments.wanted} if draw is near_ranks else {}
    for line in draw(random.Random(arguments.seed), arguments.count, cards, **given):
        print(line, flush=True)


if __name__ == "__main__":
    main()
