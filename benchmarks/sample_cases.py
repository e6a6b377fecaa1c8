"""Sample runs at random: lists for reference_cases.yaml (one GPU), and for sharded_cases.yaml (a rank of 8 or of 64).

    python benchmarks/sample_cases.py single 20261122 4 >> benchmarks/reference_cases.yaml

What to draw, a seed, and how many rounds: in each round every family (or engine) has its turn. Models have their real
widths and fewer layers, so that a run takes seconds. What memcalc refuses, what would not fit, and what is too small
to tell anything is drawn again; so the estimate decides which runs there are, but has no say in what they hold.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import memcalc
from benchmarks.record_generation import spec_of
from memcalc.architectures.huggingface.catalogue import FAMILIES as WRITTEN
from memcalc.errors import InputError
from memcalc.simulation.simulated_run import unsupported_reason
from memcalc.spec.model import ModelSpec
from memcalc.spec.model_families.conversion import attends_eagerly
from memcalc.spec.optimizers import OPTIMIZERS
from memcalc.spec.spec import Spec
from memcalc.spec.untraced_features import unsplittable
from memcalc.step.reference.decoder import refuse_unsupported

GIB = 2**30
SMALLEST, LARGEST = 1 * GIB, 68 * GIB  # of an estimate: below, the libraries' workspaces are most of it

# A family, and presets of it. Not here: those with latent attention or sinks, which the reference decoder has not.
FAMILIES = {
    "gpt2": ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"],
    "gpt_neo": ["gpt-neo-125m", "gpt-neo-1.3b"],
    "gpt_bigcode": ["starcoder"],
    "codegen": ["codegen-350m", "codegen-2b"],
    "llama": ["llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "llama-2-7b"],
    "mistral": ["mistral-7b"],
    "mixtral": ["mixtral-8x7b"],
    "qwen2": ["qwen2.5-0.5b", "qwen2.5-7b"],
    "qwen2_moe": ["qwen1.5-moe-a2.7b"],
    "qwen3": ["qwen3-0.6b", "qwen3-4b"],
    "qwen3_moe": ["qwen3-30b-a3b"],
    "gemma2": ["gemma-2-2b", "gemma-2-9b"],
    "gemma3_text": ["gemma-3-1b"],
    "phi": ["phi-1.5", "phi-2"],
    "phimoe": ["phi-3.5-moe"],
    "falcon": ["falcon-7b"],
    "mpt": ["mpt-7b"],
    "olmo": ["olmo-1b"],
    "olmo2": ["olmo-2-7b"],
    "olmoe": ["olmoe-1b-7b"],
    "granite": ["granite-3.1-2b", "granite-3.1-8b"],
    "granitemoe": ["granite-3.0-1b-a400m"],
    "cohere2": ["command-r7b"],
    "glm4": ["glm-4-9b"],
    "stablelm": ["stablelm-2-1.6b", "stablelm-3b-4e1t"],
    "starcoder2": ["starcoder2-3b", "starcoder2-7b"],
    "smollm3": ["smollm3-3b"],
    "ernie4_5": ["ernie-4.5-0.3b"],
    "nanochat": ["nanochat-d20"],
}
# Families with transformers modules that were modelled after those.
LATER = {
    "ernie4_5": ["ernie-4.5-0.3b"],
    "glm4": ["glm-4-9b"],
    "gpt_neox": ["pythia-1.4b", "pythia-6.9b"],
    "granite": ["granite-3.1-2b", "granite-3.1-8b"],
    "mixtral": ["mixtral-8x7b"],
    "nanochat": ["nanochat-d20"],
    "olmo": ["olmo-1b"],
    "olmo2": ["olmo-2-7b"],
    "opt": ["opt-125m", "opt-1.3b", "opt-6.7b"],
    "qwen2_moe": ["qwen1.5-moe-a2.7b"],
    "qwen3_moe": ["qwen3-30b-a3b"],
    "seed_oss": ["seed-oss-36b"],
    "starcoder2": ["starcoder2-3b", "starcoder2-7b"],
}
# And after those again: of which presets have layers that a GPU holds.
LATEST = {
    "bloom": ["bloom-7b1"],
    "cohere": ["command-r"],
    "cohere2": ["command-r7b"],
    "deepseek_v2": ["deepseek-v2-lite"],
    "ernie4_5_moe": ["ernie-4.5-21b-a3b"],
    "falcon": ["falcon-7b"],
    "gemma": ["gemma-2b", "gemma-7b"],
    "gemma2": ["gemma-2-2b", "gemma-2-9b"],
    "gemma3_text": ["gemma-3-1b"],
    "gpt_bigcode": ["starcoder"],
    "gpt_neo": ["gpt-neo-125m", "gpt-neo-1.3b", "gpt-neo-2.7b"],
    "gptj": ["gpt-j-6b"],
    "granitemoe": ["granite-3.0-1b-a400m"],
    "mpt": ["mpt-7b"],
    "olmo3": ["olmo-3-7b"],
    "olmoe": ["olmoe-1b-7b"],
    "phi": ["phi-1.5", "phi-2"],
    "phi3": ["phi-3-mini"],
    "phimoe": ["phi-3.5-moe"],
    "smollm3": ["smollm3-3b"],
    "stablelm": ["stablelm-2-1.6b", "stablelm-3b-4e1t"],
}
IN_TRANSFORMERS = ("gpt2", "codegen", "llama", "mistral", "qwen2", "qwen3")  # implementation: huggingface
EAGER_ONLY = "codegen"  # transformers 5.23 has no other attention for it
ENGINES = [("fsdp2", 3), ("fsdp2", 2), ("ddp", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)]
OPTIMIZERS_DRAWN = ("adamw", "adam", "sgd", "momentum", "lion", "adafactor", "adagrad", "rmsprop", "muon", "lamb")


USUAL = {"recompute": "none", "dtype": "bf16", "gradient_accumulation_steps": "1"}


class Lot(random.Random):
    """Draws of one seed."""

    def often(self, usual: object, share: float, *others: object) -> str:
        """`others` in a share of the draws."""
        return str(self.choice(others) if self.random() < share else usual)

    def length(self, most: int) -> int:
        """Of a sequence: a round number, or any."""
        rounded = [length for length in (256, 512, 1024, 2048, 4096) if length <= most]
        return self.choice(rounded) if self.random() < 0.5 else self.randint(100, min(most, 3000))


def sizes(lot: Lot, model: ModelSpec) -> list[str]:
    """Layers, and tokens: 200 to 16,384 of them."""
    layers = lot.choice([1, 2]) if model.moe else min(model.num_layers, lot.choice([2, 3, 4, 6, 8, 12]))
    length = lot.length(model.max_position_embeddings)
    batch = lot.randint(1, max(1, min(8, 16384 // length)))
    return [f"num_layers={layers}", f"b={batch}", f"s={length}"]


def settings(lot: Lot, recipes: tuple[str, ...]) -> list[str]:
    """What any run on PyTorch can have; of a single recipe, DeepSpeed's, bf16."""
    recipe = lot.choice(recipes)
    drawn = {
        "recipe": recipe,
        "dtype": lot.often("bf16", 0.15 if len(recipes) > 1 and recipe != "fp32" else 0, "fp16"),
        "attention": lot.choice(["eager", "memory-efficient", *(["flash", "flash"] if recipe != "fp32" else [])]),
        "recompute": lot.often("none", 0.5, "full", "selective", "every-2", "every-3"),
        "dropout": lot.often(0, 0.4, 0.1),
        "gradient_accumulation_steps": lot.often(1, 0.3, 2, 3),
    }
    return [f"{name}={value}" for name, value in drawn.items() if str(value) != USUAL.get(name)]


def updated(lot: Lot, optimizers: tuple[str, ...]) -> list[str]:
    """An optimizer, and how it is written."""
    optimizer = lot.choice(optimizers)
    written = lot.choice(OPTIMIZERS[optimizer].implementations)
    return [f"optimizer={optimizer}", f"optimizer_implementation={written}"]


def tuned(lot: Lot) -> list[str]:
    """Adapters, in a quarter of the runs; of these one in three on 4 bits."""
    if lot.random() >= 0.25:
        return []
    drawn = [f"lora.rank={lot.choice([8, 16, 64])}", f"lora.target_modules={lot.choice(['all-linear', 'attention'])}"]
    return drawn + (["qlora.block_size=64"] if lot.random() < 1 / 3 else [])


def single(lot: Lot, rounds: int) -> Iterator[str]:
    """Each family's plain modules once a round, and transformers' of those that have formulas three times."""
    deck = [(family, "plain") for family in FAMILIES] + [(family, "huggingface") for family in IN_TRANSFORMERS] * 3
    yield from alone(lot, deck * rounds)


def theirs(lot: Lot, rounds: int) -> Iterator[str]:
    """transformers' modules of the later families once a round."""
    yield from alone(lot, [(family, "huggingface") for family in LATER] * rounds)


def latest(lot: Lot, rounds: int) -> Iterator[str]:
    """The same of the latest."""
    yield from alone(lot, [(family, "huggingface") for family in LATEST if family in WRITTEN] * rounds)


def alone(lot: Lot, deck: list[tuple[str, str]]) -> Iterator[str]:
    """Runs on one GPU, each of a family's modules."""
    for family, implementation in deck:
        while True:
            preset = lot.choice(FAMILIES.get(family) or LATER.get(family) or LATEST[family])
            words = sizes(lot, memcalc.load(preset).model)
            words += settings(lot, ("fp32", "amp", "pure", "mixed-16", "mixed-18", "mixed-20"))
            words += updated(lot, (*OPTIMIZERS_DRAWN, "adamw", "adam-8bit", "adam-8bit", "lion-8bit"))
            if lot.random() < 0.35:
                words.append(f"loss={lot.choice(['chunked', 'chunked', 'fused', 'vocab-parallel'])}")
            words += ["zero_grad=zero"] * (lot.random() < 0.15) + ["gradient_clipping=1"] * (lot.random() < 0.15)
            words += tuned(lot)
            if can_be(preset, *words, f"implementation={implementation}"):
                yield " ".join([preset, *words, f"implementation={implementation}"])
                break


def sharded(
    lot: Lot,
    rounds: int,
    engines: Sequence[tuple[str, int]] = ENGINES,
    recipes: tuple[str, ...] = ("fp32", "amp", "pure"),
) -> Iterator[str]:
    """Each engine and stage at 8 and at 64 ranks once a round; `recipes`: of PyTorch's engines."""
    for engine, stage, ranks in [(*engine, ranks) for engine in engines for ranks in (8, 64)] * rounds:
        while True:
            family = lot.choice([*FAMILIES, *IN_TRANSFORMERS * 3])
            preset = lot.choice(FAMILIES[family])
            words = sizes(lot, memcalc.load(preset).model)
            words += settings(lot, ("mixed-16",) if engine == "deepspeed" else recipes)
            words += updated(lot, ("adamw", "adamw", "adam", "sgd", "momentum", "lion"))
            theirs = family in IN_TRANSFORMERS and engine != "deepspeed" and lot.random() < 0.4
            words.append(f"implementation={'huggingface' if theirs else 'plain'}")
            words += [f"engine={engine}", f"zero_stage={stage}", f"data_parallel={ranks}"]
            if can_be(preset, *words):
                yield " ".join([preset, *words])
                break


def zero(lot: Lot, rounds: int) -> Iterator[str]:
    """transformers' modules at stages 1, 2 and three times 3, a third with adapters, each once a round."""
    deck = [(stage, ranks) for stage, ranks in ((1, 8), (2, 8), (3, 2), (3, 8), (3, 64))]
    for stage, ranks in deck * rounds:
        while True:
            family = lot.choice([*LATER, *LATEST, *IN_TRANSFORMERS * 2])
            preset = lot.choice(LATER.get(family) or LATEST.get(family) or FAMILIES[family])
            words = sizes(lot, memcalc.load(preset).model)
            words += settings(lot, ("mixed-16",)) + updated(lot, ("adamw", "adamw", "adam", "sgd", "lion"))
            words += [f"lora.rank={lot.choice([8, 16, 64])}"] if lot.random() < 1 / 3 else []
            words += ["implementation=huggingface", "engine=deepspeed", f"zero_stage={stage}"]
            words.append(f"data_parallel={ranks}")
            if can_be(preset, *words) and not unsupported_reason(memcalc.load(preset, *words)):
                yield " ".join([preset, *words])
                break


# Losses that read the LM head's weight, 8-bit states and a 4-bit base under ZeRO, each with its stages and ranks.
ZERO_VARIANTS = (
    *((f"loss={loss}", stage, 8) for loss in ("chunked", "fused") for stage in (1, 2)),
    *(("optimizer=adam-8bit", stage, ranks) for stage, ranks in ((1, 8), (2, 8), (3, 2), (3, 8))),
    *(("qlora.block_size=64 lora.adapter_dtype=compute", stage, ranks) for stage in (1, 2) for ranks in (2, 8)),
)


ZERO_FP32 = tuple(("dtype=fp32", stage, ranks) for stage in (1, 2) for ranks in (2, 8))
ZERO_SUMS = (
    *(("dtype=bf16", stage, ranks) for stage in (1, 2, 3) for ranks in (2, 8)),
    *(("lora.rank=16", stage, 4) for stage in (1, 2, 3)),
)

MOST_HOST_BYTES = 6 * 2**30
ZERO_OFFLOAD = (
    *(("offload=optimizer", stage, ranks) for stage in (2, 3) for ranks in (2, 8)),
    *(("offload=all", 3, ranks) for ranks in (2, 8)),
)


def zero_variants(
    lot: Lot, rounds: int, variants: tuple[tuple[str, int, int], ...] = ZERO_VARIANTS, recipe: str = "mixed-16"
) -> Iterator[str]:
    """Each variant once a round, with plain modules or transformers'."""
    for variant, stage, ranks in variants * rounds:
        while True:
            implementation = lot.choice(["plain", "huggingface"])
            family = lot.choice([*FAMILIES] if implementation == "plain" else [*LATER, *IN_TRANSFORMERS * 2])
            preset = lot.choice(FAMILIES.get(family) or LATER[family])
            words = sizes(lot, memcalc.load(preset).model) + settings(lot, (recipe,))
            words += [] if variant.startswith("optimizer") else updated(lot, ("adamw", "adamw", "adam", "lion"))
            words += [f"lora.rank={lot.choice([8, 16, 64])}"] if variant.startswith("qlora") else []
            words += [*variant.split(), f"implementation={implementation}", "engine=deepspeed"]
            words += [f"zero_stage={stage}", f"data_parallel={ranks}"]
            runs = can_be(preset, *words) and not unsupported_reason(memcalc.load(preset, *words))
            if runs and (not variant.startswith("offload") or host_bytes(preset, *words) <= MOST_HOST_BYTES):
                yield " ".join([preset, *words])
                break


def host_bytes(preset: str, *words: str) -> int:
    """Host memory of a rank with offload, which the machine that simulates the GPU really allocates."""
    host = memcalc.estimate(preset, *words).headline.host
    return 0 if host is None else host.peak_bytes


# Whole models that a GPU of 80 GB is used for, and how they are spread.
WHOLE = ["gpt2-xl", "llama-3.2-1b", "llama-3.2-3b", "llama-2-7b", "llama-3-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b"]
SPREADS = [
    *["engine=fsdp2 zero_stage=3"] * 3,
    "engine=fsdp2 zero_stage=2",
    *["engine=ddp zero_stage=0"] * 2,
    *(f"engine=deepspeed zero_stage={stage}" for stage in (1, 2, 3)),
    "engine=fsdp2 zero_stage=3 tensor_parallel=4 sequence_parallel=true",
]
NEARLY_FULL = range(24 * 2**30, 76 * 2**30)  # allocated bytes


def whole(lot: Lot, rounds: int) -> Iterator[str]:
    """Whole models on 8 and 64 ranks, of which each allocates a large part of 80 GB."""
    for spread in SPREADS * rounds:
        while True:
            tensor = 4 if "tensor" in spread else 1
            words = [f"s={lot.choice([1024, 2048, 4096, 8192])}", f"b={lot.choice([1, 2, 3, 4, 6, 8, 12, 16])}"]
            recipe = "mixed-16" if "deepspeed" in spread else lot.choice(["pure", "pure", "amp", "fp32"])
            kernel = "memory-efficient" if recipe == "fp32" else "flash"
            words += [f"recipe={recipe}", f"attention={kernel}", f"recompute={lot.choice(['none', 'full'])}"]
            words += [f"optimizer_implementation={lot.choice(['fused', 'foreach'])}", *spread.split()]
            theirs = "deepspeed" not in spread and tensor == 1 and kernel == "flash" and lot.random() < 0.5
            words += [f"implementation={'huggingface' if theirs else 'plain'}"]
            words += [f"data_parallel={lot.choice([8, 64]) // tensor}"]
            preset = lot.choice(WHOLE)
            if can_be(preset, *words, sizes=NEARLY_FULL):
                yield " ".join([preset, *words])
                break


Schedules = Sequence[tuple[str, int, int]]  # name, chunks of layers per stage, stages
PIPELINES: Schedules = [
    (name, virtual, stages) for name, virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)) for stages in (2, 4)
]
STEADY: Schedules = [each for each in PIPELINES if each[0] != "gpipe"]  # with steps that repeat, however many
MANY = (8, 16)  # micro-batches per stage: more than a replay plays


def pipelines(
    lot: Lot, rounds: int, *, each: Sequence[int] = (1, 2, 3), schedules: Schedules = PIPELINES
) -> Iterator[str]:
    """Each schedule at 2 and at 4 stages once a round; of the stages one is drawn. `each`: micro-batches per stage."""
    for schedule, virtual, stages in [*schedules] * rounds:
        while True:
            preset = lot.choice(FAMILIES[lot.choice([*FAMILIES])])
            words = [f"num_layers={lot.choice([8, 8, 12, 16])}", f"b={lot.choice([1, 2, 3, 4])}"]
            words += [f"s={lot.choice([512, 1024, 2048, 1000])}"]
            recipe = lot.choice(["pure", "pure", "mixed-16", "mixed-18", "mixed-20", "fp32"])
            kernel = "memory-efficient" if recipe == "fp32" else lot.choice(["flash", "flash", "eager"])
            words += [f"recipe={recipe}", f"attention={kernel}", f"recompute={lot.choice(['none', 'full', 'every-2'])}"]
            words += updated(lot, ("adamw", "adamw", "adam", "sgd", "lion"))
            words += [f"pipeline_parallel={stages}", f"schedule={schedule}", f"virtual_stages={virtual}"]
            words += [f"gradient_accumulation_steps={stages * lot.choice(each)}"]
            if can_be(preset, *words) and not unsupported_reason(memcalc.load(preset, *words)):
                yield " ".join([preset, *words, f"rank={lot.choice(range(stages))}"])
                break


POLICY = "recipe=fp32 dtype=bf16 fsdp.param_dtype=bf16"
SHARDED_RECIPES = (f"{POLICY} fsdp.reduce_dtype=fp32", POLICY, "recipe=pure", "recipe=mixed-16", "recipe=mixed-20")


def sharded_pipelines(
    lot: Lot, rounds: int, *, each: Sequence[int] = (1, 2, 3), schedules: Schedules = PIPELINES
) -> Iterator[str]:
    """`pipelines` under FSDP2."""
    for schedule, virtual, stages in [*schedules] * rounds:
        while True:
            preset = lot.choice(FAMILIES[lot.choice([*FAMILIES])])
            ranks = lot.choice([2, 4, 8])
            words = [f"num_layers={lot.choice([8, 8, 12, 16])}", f"b={lot.choice([1, 2, 3])}"]
            words += [f"s={lot.choice([512, 1024, 2048, 1000])}", lot.choice(SHARDED_RECIPES), "engine=fsdp2"]
            words += [f"zero_stage={lot.choice([2, 2, 3])}", f"fsdp.wrap={lot.choice(['layers', 'layers-and-ends'])}"]
            words += [f"attention={lot.choice(['flash', 'flash', 'eager'])}"]
            words += [f"recompute={lot.choice(['none', 'full', 'every-2'])}"]
            words += updated(lot, ("adamw", "adamw", "adam"))  # DTensor has no fused SGD
            words += [f"pipeline_parallel={stages}", f"schedule={schedule}", f"virtual_stages={virtual}"]
            words += [f"gradient_accumulation_steps={stages * lot.choice(each)}", f"data_parallel={ranks}"]
            words = " ".join(words).split()
            if can_be(preset, *words) and not unsupported_reason(memcalc.load(preset, *words)):
                yield " ".join([preset, *words, f"rank={lot.choice(range(stages)) * ranks}"])
                break


def split_pipelines(lot: Lot, rounds: int) -> Iterator[str]:
    """Each schedule at 2 and at 4 stages once a round, with layers split by DTensor, half of them under FSDP2."""
    for schedule, virtual, stages in [*PIPELINES] * rounds:
        shards = lot.choice([1, 4])
        while True:
            preset, split = lot.choice(FAMILIES[lot.choice([*FAMILIES])]), lot.choice([2, 2, 4])
            words = [f"num_layers={lot.choice([8, 8, 12, 16])}", f"b={lot.choice([1, 2, 3])}"]
            words += [f"s={lot.choice([512, 1024, 2048])}", f"attention={lot.choice(['flash', 'flash', 'eager'])}"]
            words += [f"recompute={lot.choice(['none', 'full', 'every-2'])}"]
            words += [lot.choice(SHARDED_RECIPES[:3] if shards > 1 else ["recipe=pure"])]
            words += updated(lot, ("adamw", "adamw", "adam"))
            words += [f"pipeline_parallel={stages}", f"schedule={schedule}", f"virtual_stages={virtual}"]
            words += [f"gradient_accumulation_steps={stages * lot.choice([1, 2, 3])}", f"tensor_parallel={split}"]
            words += lot.choice([[], ["sequence_parallel=true"], ["sequence_parallel=true"]])
            words += lot.choice([[], ["loss=vocab-parallel"]])
            if shards > 1:
                words += ["engine=fsdp2", f"zero_stage={lot.choice([2, 2, 3])}", f"data_parallel={shards}"]
                words += [f"fsdp.wrap={lot.choice(['layers', 'layers-and-ends'])}"]
            words = " ".join(words).split()
            if not can_be(preset, *words):
                continue
            spec = memcalc.load(preset, *words)
            if not unsupported_reason(spec) and unsplittable(spec) is None:
                yield " ".join([preset, *words, f"rank={lot.choice(range(stages)) * shards * split}"])
                break


# Several ranks, and what a run on them can have beside.
LAYOUTS = (
    "engine=ddp data_parallel=8",
    "engine=fsdp2 zero_stage=3 data_parallel=8",
    "engine=fsdp2 zero_stage=2 data_parallel=2",
    "engine=fsdp2 zero_stage=3 data_parallel=8 data_parallel_replicate=2",
    "engine=fsdp2 zero_stage=3 data_parallel=4 tensor_parallel=2 sequence_parallel=true",
    "engine=fsdp1 zero_stage=3 data_parallel=8",
    "tensor_parallel=4",
    "engine=deepspeed zero_stage=1 data_parallel=4",
    "engine=deepspeed zero_stage=2 data_parallel=4",
    "engine=deepspeed zero_stage=3 data_parallel=4",
)
RECIPES_DRAWN = ("mixed-20", "mixed-20", "mixed-18", "mixed-16", "pure", "amp", "fp32")
BESIDE = (
    "gradient_clipping=1",
    "zero_grad=zero",
    "ema=fp32",
    "ema=weights",
    "loss=chunked",
    "loss=fused",
    "loss=vocab-parallel",
    "lora.rank=16",
    "lora.rank=16 qlora.block_size=64",
    "offload=all",
    "offload_activations=pinned",
    "gradient_sync=last",
    "reentrant_checkpoints=true recompute=full",
)


def wide(lot: Lot, rounds: int) -> Iterator[str]:
    """Each layout once a round, under any recipe and optimizer, with up to two other fields."""
    for layout in LAYOUTS * rounds:
        while True:
            implementation = lot.choice(["plain", "huggingface"])
            family = lot.choice([*FAMILIES] if implementation == "plain" else [*LATER, *LATEST, *IN_TRANSFORMERS])
            preset = lot.choice(LATER.get(family) or LATEST.get(family) or FAMILIES[family])
            words = sizes(lot, memcalc.load(preset).model) + settings(lot, RECIPES_DRAWN)
            words += updated(lot, (*OPTIMIZERS_DRAWN, "adamw", "adam-8bit", "lion-8bit"))
            beside = lot.sample(BESIDE, lot.choice([0, 1, 2]))
            last = {word.partition("=")[0]: word for word in " ".join([*words, *beside]).split()}
            words = [*last.values(), *layout.split(), f"implementation={implementation}"]
            if can_be(preset, *words) and not unsupported_reason(memcalc.load(preset, *words)):
                yield " ".join([preset, *words])
                break


def can_be(preset: str, *words: str, sizes: range = range(SMALLEST, LARGEST + 1)) -> bool:
    """Whether there are formulas and modules for it, and it fits on a GPU of 80 GB."""
    try:
        spec = memcalc.load(preset, *words)
        if spec.training.implementation == "plain":
            refuse_unsupported(spec)
        elif not in_transformers(spec):
            return False
        peak = memcalc.estimate(spec, gpu="a100-80gb").ledger.peak_bytes
    except InputError:
        return False
    return peak in sizes


def in_transformers(spec: Spec) -> bool:
    """Whether transformers' modules can do it: whole layers again, and kernels that PyTorch has for what they ask."""
    model, training = spec.model, spec.training
    kernels = {"eager"} if model.architecture == EAGER_ONLY else {"eager", "flash", "memory-efficient"}
    if model.num_key_value_heads < model.num_attention_heads:
        kernels.discard("memory-efficient")  # they leave grouped keys to the kernel
    return training.recompute != "selective" and training.attention in kernels


# Models of the families that transformers generates with, where no preset has one.
OF_HUB = {
    "arcee": ["arcee-ai/AFM-4.5B"],
    "flex_olmo": ["allenai/FlexOlmo-7x7B-1T"],
    "hunyuan_v1_dense": ["tencent/Hunyuan-0.5B-Instruct"],
    "nemotron": ["OpenLLM-France/Luciole-1B-Base"],
}
OF_PRESETS = {"deepseek_v3": ["deepseek-v3"], "exaone4": ["exaone-4-1.2b"], "glm": ["glm-4-9b-chat"]}
OF_PRESETS |= {"glm4_moe": ["glm-4.5-air"], "gpt_oss": ["gpt-oss-20b"], "minimax_m2": ["minimax-m2"]}
OF_PRESETS |= {"llama4_text": ["llama-4-scout"]}


def generations(lot: Lot, rounds: int, quantized: float = 0.15, more: tuple[str, ...] = ()) -> Iterator[str]:
    """Generation with each family of transformers once a round, with any cache, kernel and dtype."""
    models = FAMILIES | LATER | LATEST | OF_HUB | OF_PRESETS
    for family in sorted(models) * rounds:
        while True:
            name = lot.choice(models[family])
            interval = memcalc.load(name).model.full_attention_interval
            layers = lot.choice([2, 3]) if interval < 2 else interval + lot.choice([0, 1])
            words = [f"l={layers}", f"batch_size={lot.choice([1, 1, 2, 4, 8, 32])}"]
            words += [f"prompt_length={lot.choice([17, 100, 300, 512, 1000, 1024, 2048])}"]
            words += [
                f"new_tokens={lot.choice([1, 8, 33, 64])}",
                f"cache={lot.choice(['dynamic', 'dynamic', 'static'])}",
            ]
            words += [f"attention={lot.choice(['flash', 'flash', 'eager', 'memory-efficient'])}"]
            words += ["program=generate"] * (lot.random() < 1 / 2)
            words += [f"dtype={lot.choice(['bf16', 'bf16', 'fp16', 'fp32'])}"]
            words += [f"quantization={lot.choice(['nf4', 'fp4'])}", *more] if lot.random() < quantized else []
            try:
                found = spec_of(" ".join([name, *words]))
            except InputError:
                continue
            sdpa = found.inference is not None and found.inference.attention != "eager"
            if sdpa and attends_eagerly(found.model.architecture, "huggingface"):  # flash-attn, which is not recorded
                continue
            yield " ".join([name, *words])
            break


SMALL = (
    *("gpt2-medium", "qwen2.5-0.5b", "qwen3-0.6b", "llama-3.2-1b", "pythia-1.4b", "gemma-3-1b", "opt-1.3b"),
    *("granite-3.1-2b", "ernie-4.5-0.3b"),
)
LONG = 16_384  # layers in all forwards of a generation of which not every token is replayed


def long_generations(lot: Lot, rounds: int) -> Iterator[str]:
    """Whole models that generate many tokens, each model once a round."""
    for name in SMALL * rounds:
        model = memcalc.load(name).model
        tokens = lot.choice([9, 10, 12]) * LONG // (8 * model.num_layers)
        prompts = [length for length in (17, 100, 500, 1000, 2048) if length + tokens < model.max_position_embeddings]
        words = [f"batch_size={lot.choice([1, 4, 8, 16, 32])}", f"prompt_length={lot.choice(prompts)}"]
        words += [f"new_tokens={tokens}", "cache=dynamic", f"attention={lot.choice(['flash', 'flash', 'eager'])}"]
        words += ["program=generate"] * (lot.random() < 1 / 2) + [f"dtype={lot.choice(['bf16', 'bf16', 'fp32'])}"]
        yield " ".join([name, *words])


DRAWS: dict[str, Callable[[Lot, int], Iterator[str]]] = {
    "single": single,
    "theirs": theirs,
    "latest": latest,
    "sharded": sharded,
    "main-gradients": partial(sharded, engines=ENGINES[:3], recipes=("mixed-20", "mixed-20", "mixed-18")),
    "zero": zero,
    "zero-variants": zero_variants,
    "zero-fp32": partial(zero_variants, variants=ZERO_FP32, recipe="fp32"),
    "zero-sums": partial(zero_variants, variants=ZERO_SUMS, recipe="mixed-20"),
    "zero-offload": partial(zero_variants, variants=ZERO_OFFLOAD),
    "zero-sums-offload": partial(zero_variants, variants=ZERO_OFFLOAD, recipe="mixed-20"),
    "whole": whole,
    "wide": wide,
    "pipelines": pipelines,
    "sharded-pipelines": sharded_pipelines,
    "long-pipelines": partial(pipelines, each=MANY, schedules=STEADY),
    "long-sharded-pipelines": partial(sharded_pipelines, each=MANY, schedules=STEADY),
    "split-pipelines": split_pipelines,
    "generations": generations,
    "quantized-generations": partial(generations, quantized=1, more=("compute_dtype=null",)),
    "long-generations": long_generations,
}


def main() -> None:
    """Print the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*DRAWS])
    parser.add_argument("seed", type=int)
    parser.add_argument("rounds", type=int)
    arguments = parser.parse_args()
    draw = DRAWS[arguments.what]
    print(
        f"drawn-{arguments.seed}:   # benchmarks/sample_cases.py {arguments.what} {arguments.seed} {arguments.rounds}"
    )
    for case in draw(Lot(arguments.seed), arguments.rounds):
        print(f"- {case}")


if __name__ == "__main__":
    main()
