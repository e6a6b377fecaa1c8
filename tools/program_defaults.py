"""Settings that each framework's program decides and no file sets: one table per program, by version.

Each program has an example file. memcalc reads it at every release that it tells apart; the table has the fields in
which the run differs from memcalc's own step, so it cannot say anything that the importers do not do.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from memcalc.frameworks.releases import RELEASES
from memcalc.importers.loading import load
from memcalc.spec.fields import BLOCKS, NESTED
from memcalc.spec.programs import number
from memcalc.spec.spec import Spec
from tools.markdown import table

_TRAINER = "model_name_or_path: meta-llama/Llama-3.2-1B\nper_device_train_batch_size: 2\nbf16: true\n"
_TRL = f"{_TRAINER}max_length: 1024\n"
_OWN = (
    "preset: llama-3.2-1b\ntraining:\n  implementation: {modules}\n  dtype: bf16\n  recipe: amp\n  framework: {name}\n"
)
_FSDP = (
    "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n"
    "  fsdp_reshard_after_forward: true\n"
)


class Example(NamedTuple):
    """A file as a user of the program has it, of Llama-3.2-1B where the program has it.

    Args:
        file: its name.
        text: of it.
        settings: what it cannot know.
    """

    file: str
    text: str
    settings: tuple[str, ...] = ()


EXAMPLES: dict[str, Example] = {
    "trainer": Example("config.yaml", _TRAINER),
    "sft": Example("config.yaml", _TRL),
    "dpo": Example("config.yaml", f"{_TRL}beta: 0.1\n"),
    "reward": Example("config.yaml", f"{_TRL}center_rewards_coefficient: 0.01\n"),
    "grpo": Example("config.yaml", f"{_TRAINER}num_generations: 8\nmax_completion_length: 256\n"),
    "accelerate": Example("config.yaml", _FSDP, ("preset=llama-3.2-1b", "training.implementation=huggingface")),
    "deepspeed": Example(
        "ds_config.json",
        '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}',
        ("preset=llama-3.2-1b", "training.implementation=huggingface", "data_parallel=8"),
    ),
    "lightning": Example("memcalc.yaml", _OWN.format(modules="huggingface", name="lightning")),
    "litgpt": Example(
        "config.yaml",
        "checkpoint_dir: checkpoints/meta-llama/Llama-3.2-1B\nprecision: bf16-true\ntrain:\n  micro_batch_size: 2\n"
        "  max_seq_length: 1024\n",
        ("data_parallel=1",),
    ),
    "torchtune": Example(
        "config.yaml",
        "model:\n  _component_: torchtune.models.llama3_2.llama3_2_1b\ntokenizer:\n  max_seq_len: 1024\nbatch_size: 2\n"
        "optimizer:\n  _component_: torch.optim.AdamW\nloss:\n"
        "  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss\ndtype: bf16\n",
        ("data_parallel=1",),
    ),
    "torchtitan": Example(
        "config.toml",
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n[parallelism]\n'
        "data_parallel_shard_degree = 8\n",
    ),
    "axolotl": Example(
        "config.yaml",
        "base_model: meta-llama/Llama-3.2-1B\ndatasets:\n  - path: some/data\nbf16: true\nmicro_batch_size: 2\n",
    ),
    "llama-factory": Example(
        "config.yaml",
        "model_name_or_path: meta-llama/Llama-3.2-1B\nstage: sft\ndo_train: true\nfinetuning_type: full\n"
        "cutoff_len: 1024\nper_device_train_batch_size: 2\nbf16: true\n",
    ),
    "megatron": Example(
        "train.sh",
        "torchrun pretrain_gpt.py --num-layers 16 --hidden-size 2048 --num-attention-heads 32 --seq-length 1024 "
        "--max-position-embeddings 1024 --micro-batch-size 2 --vocab-size 32000 --bf16\n",
        ("data_parallel=1",),
    ),
    "loop": Example("memcalc.yaml", _OWN.format(modules="plain", name="loop")),
}
BASE = ("llama-3.2-1b", "training.implementation=plain", "training.dtype=bf16", "training.recipe=amp")
# What the file, the model or the data decide; the mask of padded sequences by release is in the table of releases.
_FROM_FILES = frozenset(
    (
        *("micro_batch_size", "sequence_length", "global_batch_size", "framework", "versions", "torch_version"),
        *("data_parallel", "finetune", "lora", "qlora", "padding_mask"),
    )
)


def program_defaults_table(program: str) -> str:
    """The fields that a program decides: its value, since which release, and what the field is."""
    base = _fields(load(BASE[0], BASE[1:]))
    rows: list[list[str]] = []
    runs = _by_release(program)
    for field in sorted({field for run in runs for field in run.fields}, key=_position):
        values = [(run, run.fields.get(field, base[field])) for run in runs]
        if all(value == base[field] for _, value in values):
            continue
        rows += [[f"`{field}`", f"`{_shown(value)}`", when, _meaning(field)] for value, when in _periods(values)]
    return table(["field", "value", "versions", "description"], rows)


class _Run(NamedTuple):
    """The fields of an example, read at one release of one package, and the newest ones of the others."""

    package: str
    since: str
    fields: Mapping[str, Any]


def _by_release(program: str) -> list[_Run]:
    """The example at the newest releases, then at each older one that differs, package by package."""
    newest = {package: known.candidates[0] for package, known in RELEASES.items()}
    found = [_Run("", "", _read(program, newest))]
    for package, known in RELEASES.items():
        oldest = min((*known.changes, *known.candidates), key=number)
        releases = sorted({*known.changes, oldest}, key=number, reverse=True)
        found += [_Run(package, since, _read(program, newest | {package: since})) for since in releases]
    return found


def _read(program: str, releases: Mapping[str, str]) -> Mapping[str, Any]:
    example = EXAMPLES[program]
    versions = [f"training.versions.{package}=v{release}" for package, release in releases.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, example.file)
        path.write_text(example.text)
        return _fields(load(path, (*example.settings, f"training.framework={program}", *versions)))


def _fields(spec: Spec) -> dict[str, Any]:
    """The fields of training and sharding, with those of nested blocks, that no file decides."""
    training, parallelism = spec.training.model_dump(), spec.parallelism.model_dump()
    found = {**training, **training.pop("optimizer_options"), **parallelism}
    for block in ("fsdp", "zero_optimization"):
        found |= {f"{block}.{name}": value for name, value in found.pop(block).items()}
    del found["optimizer_options"]
    return {name: value for name, value in found.items() if name not in _FROM_FILES}


def _periods(values: list[tuple[_Run, Any]]) -> list[tuple[Any, str]]:
    """Each value of a field with the releases that have it; one value without any where no release changes it."""
    newest = values[0][1]
    found: list[tuple[Any, str]] = []
    current = newest
    for package, known in RELEASES.items():
        last = ""  # the release that `current` belongs to
        for run, value in values:
            if run.package != package:
                continue
            if value != current:
                found += [(current, f"{known.name} {last}")] if not found or found[-1][0] != current else []
                found.append((value, f"{known.name} before {last}"))
                current = value
            last = run.since
        current = newest
    return found or [(newest, "")]


def _position(field: str) -> tuple[int, int]:
    """Return the position of a field's block, and the field's own in a nested block, both as declared."""
    block, _, nested = field.partition(".")
    names = [*BLOCKS["training"].model_fields, *NESTED["optimizer_options"].model_fields]
    names += [*BLOCKS["parallelism"].model_fields]
    return names.index(block), [*NESTED[block].model_fields].index(nested) if nested else 0


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return json.dumps(value).strip('"')


def _meaning(field: str) -> str:
    """The first words of a field's description."""
    block, _, name = field.rpartition(".")
    blocks = (NESTED[block],) if block else (BLOCKS["training"], NESTED["optimizer_options"], BLOCKS["parallelism"])
    described = next(each.model_fields[name].description for each in blocks if name in each.model_fields)
    return re.split(r"[:;(|]|, as ", described or "")[0].strip().rstrip(",")


TABLES = {"program-defaults": program_defaults_table}
