"""Sample runs on one GPU for benchmarks/verdict_runs.py to record: every family, and fields that are seldom set.

    python -m benchmarks.field_runs models SEED ROUNDS > cases.txt    # each family's modules once a round
    python -m benchmarks.field_runs fields SEED ROUNDS > cases.txt    # each set of seldom set fields once a round
    python -m benchmarks.field_runs adapters SEED ROUNDS > cases.txt  # adapters on each family once a round
    python -m benchmarks.field_runs quantized SEED ROUNDS > cases.txt  # 4-bit bases that multiply in fp32

Models are those of memcalc/data/models.jsonl and the presets, with fewer layers and experts, so that a run takes
seconds. What memcalc rejects, or does not replay, is drawn again.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shlex import quote

import memcalc
from benchmarks.sample_cases import Lot
from memcalc.architectures.catalogue import has_formulas
from memcalc.architectures.huggingface.catalogue import FAMILIES as WRITTEN
from memcalc.errors import InputError
from memcalc.spec.model import ModelSpec
from memcalc.spec.model_families.conversion import attends_eagerly
from memcalc.spec.optimizers import IN_BACKWARD, OPTIMIZERS
from memcalc.spec.presets import preset_names
from memcalc.spec.spec import Spec
from memcalc.step.reference.decoder import refuse_unsupported
from memcalc.verdict.needs import can_replay

CATALOGUE = Path(memcalc.__file__).with_name("data") / "models.jsonl"
GPUS = {"a100-80gb": 72, "h100-80gb": 72, "h200": 130}  # GiB that an estimate may have
MOST_EXPERTS = 16
RECIPES = ("pure", "pure", "amp", "fp32", "mixed-16", "mixed-18", "mixed-20")
# torchao's 4-bit Adam needs its package; bitsandbytes compiles LAMB for every shape, which takes half a minute;
# RAdam rectifies its update from the sixth step on, and recorded are three
DRAWN_OPTIMIZERS = ("adamw", "adamw", *(name for name in OPTIMIZERS if name not in ("adam-4bit", "lamb", "radam")))

Group = tuple[str, bool, str]  # architecture, with a vision tower, implementation
Words = list[str]
Draw = Callable[[Lot, Spec], Words]


def groups() -> dict[Group, list[str]]:
    """The models of each family, by implementation, that are replayed and that the step runs."""
    lines = CATALOGUE.read_text(encoding="utf-8").splitlines()
    names = [next(iter(entry["ids"])) for entry in map(json.loads, lines) if "config" in entry]
    found: dict[Group, list[str]] = defaultdict(list)
    for name in [*names, *preset_names()]:
        for implementation in ("plain", "huggingface"):
            words = (f"implementation={implementation}", "attention=eager", "vision_tower=frozen")
            spec = valid(name, *words)
            if spec is not None and spec.model.architecture in WRITTEN:
                found[spec.model.architecture, spec.model.vision_config is not None, implementation].append(name)
    return dict(found)


def valid(name: str, *words: str, gpu: str | None = None) -> Spec | None:
    """The run; None: memcalc rejects it, or does not replay it, or PyTorch has no such kernel."""
    try:
        spec = memcalc.load(name, *words, gpu=gpu)
        if not has_formulas(spec) or not can_replay(spec):
            return None
        if spec.training.implementation == "plain":
            if spec.model.vision_config is not None:
                return None
            refuse_unsupported(spec)
    except InputError:
        return None
    model, training = spec.model, spec.training
    grouped = model.num_key_value_heads < model.num_attention_heads
    if training.implementation == "huggingface":
        if training.recompute == "selective" or (grouped and training.attention == "memory-efficient"):
            return None
        if training.dropout and model.architecture == "mpt":  # its configuration takes only whole rates
            return None
    # On a device that computes no values, mu differs from 1, and torch/optim/asgd.py makes one more tensor.
    one_by_one = training.optimizer == "asgd" and training.optimizer_implementation == "for-loop"
    # The null device has no singular value decomposition, which GaLore needs.
    return None if one_by_one or training.optimizer == "galore" else spec


def shape(lot: Lot, model: ModelSpec) -> Words:
    """Fewer layers and experts, and a batch."""
    layers = lot.choice([2, 3, 4, 6])
    first = 0
    if model.moe is not None:
        layers = lot.choice([1, 2, 3])
        first = min(model.moe.first_dense_layers, layers - 1)
    words = []
    if model.layer_pattern:
        pattern = "".join(lot.choice(sorted(set(model.layer_pattern))) for _ in range(layers + 2))
        words += [f"layer_pattern={pattern}", f"num_layers={layers + 2}"]
    else:
        interval = model.full_attention_interval
        layers += interval if 1 < interval <= 4 and lot.random() < 0.5 else 0
        words.append(f"num_layers={min(layers, model.num_layers)}")
    if model.moe is not None:
        words += [f"moe.num_experts={min(MOST_EXPERTS, model.moe.num_experts)}"]
        words += [f"moe.first_dense_layers={first}"] if model.moe.first_dense_layers else []
    length = lot.length(model.max_position_embeddings)
    return [*words, f"b={lot.randint(1, max(1, min(6, 8192 // length)))}", f"s={length}"]


def settings(lot: Lot, recipes: tuple[str, ...] = RECIPES) -> Words:
    """Fields that most runs set."""
    recipe = lot.choice(recipes)
    words = [f"recipe={recipe}"]
    if recipe != "fp32" and lot.random() < 0.15:
        words.append("dtype=fp16")
    words.append(f"attention={lot.choice(['eager', 'memory-efficient', 'flash', 'flash'])}")
    drawn: tuple[tuple[str, float, tuple[object, ...]], ...] = (
        ("recompute", 0.45, ("full", "full", "selective", "every-2", "every-3", "[0]", "[[0,1]]")),
        ("dropout", 0.3, (0.1,)),
        ("gradient_accumulation_steps", 0.3, (2, 3)),
        ("zero_grad", 0.1, ("zero",)),
        ("gradient_clipping", 0.2, (1,)),
        ("loss", 0.25, ("chunked", "chunked", "fused", "vocab-parallel")),
        ("logits_until", 0.15, ("loss", "step")),
    )
    for name, share, values in drawn:
        if lot.random() < share:
            words.append(f"{name}={lot.choice(values)}")
    return words


def updated(lot: Lot, optimizers: tuple[str, ...] = DRAWN_OPTIMIZERS) -> Words:
    """An optimizer and its options."""
    name = lot.choice(optimizers)
    written = lot.choice(OPTIMIZERS[name].implementations)
    words = [f"optimizer={name}"]
    options = {
        "amsgrad": "true",
        "nesterov": lot.choice(["true", "false"]),
        "centered": "true",
        "momentum": "0.9",
        "weight_decay": lot.choice(["0", "0.1"]),
        "rank": lot.choice([1, 16, 64, 300]),
        "paged": "true",
        "embeddings_32bit": "true",
    }
    for option in OPTIMIZERS[name].options:
        if lot.random() < (0.7 if option == "rank" else 0.25):
            words.append(f"optimizer_options.{option}={options[option]}")
            if option == "paged":
                written = "for-loop"
    return [*words, f"optimizer_implementation={written}"]


def adapters(lot: Lot) -> Words:
    """Adapters with some of their fields, on 4 bits in a third of the draws."""
    words = [f"lora.rank={lot.choice([1, 8, 16, 64, 200])}"]
    targets = ["all-linear", "attention", "mlp", "[q_proj,v_proj]", "[o_proj]", "[up_proj,down_proj]", "[q_proj]"]
    words.append(f"lora.target_modules={lot.choice([*targets, '[q_proj,lm_head]', '[gate_proj,lm_head]'])}")
    drawn: tuple[tuple[str, float, tuple[str, ...]], ...] = (
        ("lora.dropout", 0.35, ("0.05",)),
        ("lora.modules_to_save", 0.3, ("[lm_head]", "[embed_tokens]", "[embed_tokens,lm_head]")),
        ("lora.adapter_dtype", 0.3, ("fp32", "compute")),
        ("lora.base_dtype", 0.3, ("fp32", "compute")),
        ("lora.input_require_grads", 0.4, ("true", "false")),
    )
    for name, share, values in drawn:
        if lot.random() < share:
            words.append(f"{name}={lot.choice(values)}")
    if lot.random() < 0.35:
        words += [f"qlora.block_size={lot.choice([64, 64, 128, 512])}"]
        for word in ("quantization=fp4", "double_quantization=false", "quantize_lm_head=true"):
            if lot.random() < 0.3:
                words.append(f"qlora.{word}")
    return words


def four_bits(lot: Lot) -> Words:
    """Adapters on a 4-bit base that multiplies in fp32, the default of transformers' BitsAndBytesConfig."""
    words = adapters(lot)
    base = [] if any(word.startswith("qlora.") for word in words) else ["qlora.block_size=64"]
    return [*words, *base, "qlora.compute_dtype=fp32"]


def kept(lot: Lot, spec: Spec) -> Words:
    """Operators of recomputed layers that save their results."""
    from memcalc.spec.matmuls import layer_matmuls

    names = layer_matmuls(spec.model, spec.training)
    chosen = sorted(lot.sample(range(len(names)), lot.randint(1, len(names))))
    return ["recompute=full", f"recompute_keep=[{','.join(names[place] for place in chosen)}]"]


ALLOCATOR = (
    "max_split_size_mb:32",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "garbage_collection_threshold:0.6",
    "garbage_collection_threshold:0.8,max_split_size_mb:256",
    "expandable_segments:True",
    "max_non_split_rounding_mb:64,max_split_size_mb:200",
)
FP32: tuple[str, ...] = (
    *("[norm]", "[lm_head]", "[embed_tokens,lm_head]", "[embed_tokens]"),
    "[embed_tokens,lm_head,norm]",
)
ONE_BY_ONE = tuple(name for name in IN_BACKWARD if name != "lamb")


# Sets of seldom set fields, of which each has its turn; each may be rejected beside other fields, and is then redrawn.
RARE: tuple[tuple[str, Draw], ...] = (
    ("recompute_keep", kept),
    ("in backward", lambda lot, _: ["optimizer_in_backward=true", *updated(lot, ONE_BY_ONE)]),
    ("liger", lambda lot, _: ["kernels=liger", f"loss={lot.choice(['materialized', 'fused'])}"]),
    ("adafactor", lambda lot, _: updated(lot, ("adafactor", "adafactor-hf"))),
    ("8 bits", lambda lot, _: updated(lot, ("adam-8bit", "lion-8bit"))),
    ("paged", lambda lot, _: [*updated(lot, ("adamw", "lion", "adam-8bit")), "optimizer_options.paged=true"]),
    ("chunks", lambda lot, _: ["loss=chunked", f"loss_chunks={lot.choice([1, 2, 3, 5, 16, 64, 1000])}"]),
    ("loss", lambda lot, _: [f"loss={lot.choice(['fused', 'vocab-parallel'])}"]),
    ("upcast", lambda *_: ["loss_upcast=false"]),
    ("fp32 logits", lambda *_: ["logits_dtype=fp32"]),
    ("logits", lambda lot, _: [f"logits_until={lot.choice(['loss', 'step'])}"]),
    ("clipping", lambda *_: ["gradient_clipping=1"]),
    ("allocator", lambda lot, _: [f"alloc_conf={lot.choice(ALLOCATOR)}"]),
    ("ema", lambda lot, _: [f"ema={lot.choice(['weights', 'fp32'])}"]),
    ("zero_grad", lambda lot, _: ["zero_grad=zero", f"zero_grad_before={lot.choice(['forward', 'backward'])}"]),
    ("zero_grad_before", lambda *_: ["zero_grad_before=backward"]),
    ("autocast", lambda lot, _: [f"autocast={lot.choice(['true', 'false'])}"]),
    ("weights", lambda *_: ["recipe=pure", "autocast=true", "weight_dtype=fp16"]),
    ("fp32 modules", lambda lot, _: ["recipe=pure", "autocast=true", f"fp32_modules={lot.choice(FP32)}"]),
    ("gradient_dtype", lambda *_: ["recipe=mixed-18", "gradient_dtype=bf16"]),
    ("offload", lambda lot, _: [f"offload_activations={lot.choice(['pinned', 'pageable'])}"]),
    ("plans", lambda lot, _: [f"recompute={lot.choice(['[0,[1]]', '[[0,1]]', '[[0,[1]]]', '[1]'])}"]),
    ("reentrant", lambda lot, _: ["reentrant_checkpoints=true", f"recompute={lot.choice(['full', 'every-2'])}"]),
    ("windows", lambda *_: ["attention_windows=kernel"]),
    ("math", lambda *_: ["attention=math", "recipe=fp32"]),
)


def models(lot: Lot, rounds: int) -> Iterator[str]:
    """Each family's modules once a round."""
    there = groups()
    for group in [*there] * rounds:
        yield one(lot, there[group], group, lambda lot, _: [*settings(lot), *updated(lot)])


def fields(lot: Lot, rounds: int) -> Iterator[str]:
    """Each set of seldom set fields once a round, and one or two more of them where they go together."""
    there = groups()
    for _, rare in [*RARE] * rounds:
        others = [each for _, each in lot.sample(RARE, lot.choice([0, 1, 2]))]

        def chosen(lot: Lot, spec: Spec, rare: Draw = rare, others: Sequence[Draw] = others) -> Words:
            words = [*settings(lot), *updated(lot, ("adamw", "adamw", "sgd", "adam"))]
            for each in (*(others if lot.random() < 0.5 else ()), rare):
                words += each(lot, spec)
            return words

        yield one(lot, there, None, chosen)


def quantized(lot: Lot, rounds: int) -> Iterator[str]:
    """A 4-bit base of any family that multiplies in fp32, once a round."""
    there = groups()
    for _ in range(rounds):
        yield one(lot, there, None, lambda lot, _: [*settings(lot), *updated(lot), *four_bits(lot)])


def adapted(lot: Lot, rounds: int) -> Iterator[str]:
    """Adapters on each family's modules once a round."""
    there = groups()
    for group in [*there] * rounds:
        yield one(lot, there[group], group, lambda lot, _: [*settings(lot), *updated(lot), *adapters(lot)])


def one(
    lot: Lot,
    names: list[str] | dict[Group, list[str]],
    group: Group | None,
    chosen: Draw,
) -> str:
    """Draw until memcalc accepts a run."""
    while True:
        group_, there = group, names
        if isinstance(there, dict):
            group_ = lot.choice([*there])
            there = there[group_]
        assert group_ is not None
        name = lot.choice(there)
        gpu = lot.choice([*GPUS])
        base = [f"implementation={group_[2]}", *(["vision_tower=frozen"] if group_[1] else [])]
        model = memcalc.load(name, *base, "attention=eager").model
        words = [*base, *shape(lot, model)]
        spec = valid(name, *words, "attention=eager")
        if spec is None:
            continue
        words = last(words + chosen(lot, spec))
        if attends_eagerly(model.architecture, group_[2]):
            words = last([*words, "attention=eager"])
        spec = valid(name, *words, gpu=gpu)
        if spec is not None and memcalc.estimate(spec).ledger.peak_bytes < GPUS[gpu] * 2**30:
            return " ".join([name, f"gpu={gpu}", *(quote(word) if " " in word else word for word in words)])


def last(words: Words) -> Words:
    """Of a field that is set several times, the last value alone."""
    return [f"{name}={value}" for name, value in dict(word.split("=", 1) for word in words).items()]


def main() -> None:
    """Print the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["models", "fields", "adapters", "quantized"])
    parser.add_argument("seed", type=int)
    parser.add_argument("rounds", type=int)
    arguments = parser.parse_args()
    draw = {"models": models, "fields": fields, "adapters": adapted, "quantized": quantized}[arguments.what]
    for case in draw(Lot(arguments.seed), arguments.rounds):
        print(case, flush=True)


if __name__ == "__main__":
    main()
