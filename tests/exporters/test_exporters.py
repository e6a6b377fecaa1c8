"""Written layouts: the file and its settings, read back, are the same run: every row of the ledger, to the byte."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from memcalc.api import estimate, load
from memcalc.errors import InputError
from memcalc.exporters.completion import export, named_program
from memcalc.exporters.programs import DEGREES, PROGRAMS
from memcalc.importers.loading import import_file
from memcalc.report.screens.fit import written_text
from memcalc.search.exported_layout import exported_layout
from memcalc.spec.spec import Spec
from memcalc.verdict.judge import size

SMALL = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}
RUNS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "one GPU": ("gpt2", ("b=4",)),
    "DDP": ("gpt2-large", ("dtype=fp16", "recipe=amp", "data_parallel=2", "gradient_accumulation_steps=7")),
    "fp32": ("gpt2-large", ("dtype=fp32", "recipe=fp32")),
    "FSDP2": ("llama-3-8b", ("zero_stage=3", "data_parallel=8", "b=2", "recompute=full")),
    "FSDP1": (
        "qwen2.5-7b",
        (
            *("engine=fsdp1", "zero_stage=2", "data_parallel=8", "recipe=amp", "implementation=huggingface"),
            *("parallelism.fsdp.param_dtype=bf16", "parallelism.fsdp.use_orig_params=true"),
            "parallelism.fsdp.backward_prefetch=post",
        ),
    ),
    "HSDP": ("llama-3-8b", ("zero_stage=3", "data_parallel=16", "data_parallel_replicate=2", "recompute=every-2")),
    "FSDP2 and tensors": (
        "llama-3-8b",
        ("zero_stage=3", "data_parallel=4", "tensor_parallel=2", "sequence_parallel=true"),
    ),
    "FSDP2 and contexts": ("llama-3-8b", ("zero_stage=3", "data_parallel=2", "context_parallel=4", "s=8192")),
    "ZeRO 2": ("qwen2.5-7b", ("engine=deepspeed", "zero_stage=2", "data_parallel=8", "offload=optimizer")),
    "ZeRO 2 with fp32 sums": ("qwen2.5-7b", ("engine=deepspeed", "zero_stage=2", "data_parallel=8")),
    "ZeRO 3": ("qwen2.5-7b", ("zero_stage=3", "engine=deepspeed", "data_parallel=8", "offload=all", "max_grad_norm=1")),
    "LoRA": ("mistral-7b", ("lora_r=16", "finetune=lora", "b=4", "recipe=amp", "implementation=huggingface")),
    "QLoRA": ("llama-3-8b", ("finetune=qlora", "lora.rank=8", "optimizer=adam-8bit", "optimizer_options.paged=true")),
    "a hub id": ("meta-llama/Llama-3.1-8B", ("b=2", "gradient_checkpointing=true")),
    "a hub id, sharded": ("Qwen/Qwen3-8B", ("gpus=8", "zero_stage=3")),
    "Megatron": (
        "llama-3-70b",
        (
            *("tensor_parallel=8", "pipeline_parallel=4", "data_parallel=2", "sequence_parallel=true"),
            *("implementation=megatron", "recipe=megatron"),
        ),
    ),
    "Megatron's experts": (
        "mixtral-8x7b",
        ("data_parallel=8", "expert_parallel=8", "implementation=megatron", "recipe=megatron", "zero_stage=1"),
    ),
    "pipeline": ("llama-3-8b", ("pipeline_parallel=4", "data_parallel=2", "gradient_accumulation_steps=8")),
    "a plan": ("llama-3-8b", ('recompute=[0, 1, "2-5"]',)),
    "no known model": ({"name": "\x1b[31m\n::error::x: {[", "model": SMALL}, ("zero_stage=3", "data_parallel=2")),
}


@cache
def run(name: str) -> tuple[Spec, str | None]:
    source, words = RUNS[name]
    return load(source, *words, gpu="h100-80gb"), source if isinstance(source, str) else None


@cache
def rows(name: str) -> tuple[Any, dict[str, int]]:
    """The rows and totals of a run."""
    ledger = estimate(run(name)[0]).ledger
    return ledger.rows, ledger.totals


QUICK = ("one GPU", "FSDP1", "FSDP2", "HSDP", "ZeRO 2", "LoRA", "a hub id", "Megatron", "no known model")


def pairs() -> list[tuple[str, str]]:
    return [(name, program) for name in RUNS for program in PROGRAMS if not PROGRAMS[program].refusal(run(name)[0])]


@cache
def quick_pairs() -> set[tuple[str, str]]:
    """Each run of QUICK as a file of one program, and each program once, as far as these runs allow."""
    quick: set[tuple[str, str]] = set()
    for name in QUICK:
        able = [program for run_name, program in pairs() if run_name == name]
        fresh = [program for program in able if program not in {program for _, program in quick}]
        quick |= {(name, (fresh or able)[0])}
    missing = set(PROGRAMS) - {program for _, program in quick}
    return quick | {next(pair for pair in pairs() if pair[1] == program) for program in missing}


@pytest.mark.parametrize(
    ("name", "program"),
    [pytest.param(*pair, marks=() if pair in quick_pairs() else pytest.mark.long) for pair in pairs()],
)
def test_a_file_and_its_settings_are_the_run(name: str, program: str, tmp_path: Path) -> None:
    spec, model = run(name)
    path = tmp_path / f"run{PROGRAMS[program].suffixes[0]}"

    written = export(spec, program, path, model)
    path.write_text(written.text)
    back = load(path, *written.settings, gpu=written.gpu)

    imported = import_file(path, written.settings)
    assert imported is not None
    assert imported.unknown == ()
    found = estimate(back).ledger
    assert (found.rows, found.totals) == rows(name)
    assert back.parallelism == spec.parallelism


def test_every_program_has_runs_of_each_kind_that_it_can_run() -> None:
    written = pairs()
    for name, program in PROGRAMS.items():
        specs = [run(each)[0] for each, of in written if of == name]
        assert {spec.parallelism.engine for spec in specs} >= set(program.engines)
        assert {each for each in DEGREES if any(getattr(spec.parallelism, each) > 1 for spec in specs)} >= set(
            program.degrees
        ) - {"expert_parallel", "context_parallel", "pipeline_parallel"}


def test_what_a_file_holds_is_not_set_beside_it(tmp_path: Path) -> None:
    """The Trainer's own run needs nothing; Megatron-LM's script has model, layout and batch."""
    spec, model = run("a hub id")
    assert export(spec, "trainer", tmp_path / "run.yaml", model).settings == ()
    script = export(run("Megatron")[0], "megatron", tmp_path / "run.sh", None)
    assert script.settings == ("preset=llama-3-70b", "dropout=null")
    for words in (
        "--tensor-model-parallel-size 8",
        "--pipeline-model-parallel-size 4",
        "--nnodes 8",
        "--num-layers 80",
    ):
        assert words in script.text
    assert script.command("run.sh")[:5] == ["memcalc", "estimate", "run.sh", "--gpu", "h100-80gb"]


@pytest.mark.parametrize(
    ("name", "program", "file", "message"),
    [
        (
            "one GPU",
            "nemo",
            "run.yaml",
            "'nemo' is not a program that memcalc writes files for. Use accelerate, deepspeed,",
        ),
        ("one GPU", "torchtitan", "run.yaml", "a file of torchtitan ends in .toml. Write run.toml."),
        ("one GPU", "deepspeed", ".hidden", "a file of DeepSpeed ends in .json. Write .hidden.json."),
        (
            "Megatron",
            "accelerate",
            "run.yaml",
            "Accelerate does not shard as engine = megatron does. Use --as megatron.",
        ),
        (
            "pipeline",
            "trainer",
            "run.yaml",
            "transformers' Trainer has no pipeline_parallel = 4 with engine = ddp. Use",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(name: str, program: str, file: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        export(run(name)[0], program, file)

    assert message in str(caught.value)


def test_generation_has_no_file() -> None:
    with pytest.raises(InputError, match="describes training, and this is generation"):
        export(load("gpt2", "inference.batch_size=2"), "trainer", "run.yaml")
    assert named_program("trainer", "run.yml").label == "transformers' Trainer"


def test_replicas_of_torchtitan_stay_replicas(tmp_path: Path) -> None:
    """Shards of one rank are DDP; as many shards as ranks would be FSDP2."""
    spec = load("llama-3-8b", "implementation=torchtitan", "engine=ddp", "data_parallel=8")
    path = tmp_path / "run.toml"
    path.write_text(export(spec, "torchtitan", path).text)
    read = load(path)

    assert (read.parallelism.engine, read.parallelism.data_parallel) == ("ddp", 8)
    assert (read.training.implementation, read.training.recipe) == ("torchtitan", "amp")


@pytest.mark.parametrize(("gpu", "fits"), [("a100-40gb", True), ("h100-80gb:7.2GiB", True)])
def test_a_layout_says_what_it_needs_in_the_other_program(gpu: str, *, fits: bool, tmp_path: Path) -> None:
    """torchtune's 4-bit weights are torchao's NF4Tensor: to restore one takes 12 bytes an element, bitsandbytes 2."""
    words = ("framework=torchtune", "finetune=qlora", "implementation=plain", "s=512")
    layout = size(load("meta-llama/Llama-3.2-1B", *words, gpu=gpu))
    found = exported_layout([layout], "axolotl", tmp_path / "run.yaml", "meta-llama/Llama-3.2-1B")

    assert found.file.spec.training.framework == "axolotl"
    assert found.result.fits is fits
    assert found.more_bytes < 0
    said = written_text(found, Path("run.yaml"), "GiB").splitlines()[-1]
    assert said.startswith("As axolotl runs it, this layout needs ")
    assert said.endswith(" as above." if fits else " as above, and may not fit.")


def test_the_first_layout_that_fits_in_the_other_program_is_written(tmp_path: Path) -> None:
    layouts = [size(load("gpt2", f"b={batch}", "s=512", gpu="t4")) for batch in (2, 1)]
    found = exported_layout(layouts, "torchtitan", tmp_path / "run.toml")

    assert (found.layout, found.more_bytes) == (layouts[0], 0)
    assert "runs it" not in written_text(found, Path("run.toml"), "GiB")
    too_small = size(load("gpt2", "b=2", "s=512", gpu="t4:2GiB"))
    assert exported_layout([too_small, *layouts], "torchtitan", tmp_path / "run.toml").layout is layouts[0]
    of_deepspeed = size(load("gpt2", "engine=deepspeed", "zero_stage=3", "data_parallel=2", gpu="t4"))
    assert exported_layout([too_small, of_deepspeed], "torchtitan", tmp_path / "run.toml").layout is too_small


def test_a_pipeline_of_torchtitan_runs_as_it_was_estimated(tmp_path: Path) -> None:
    """By default torchtitan counts the ends as layers, and its local batch has all micro-batches of a pipeline."""
    spec = load("llama-3-8b", "pipeline_parallel=4", "data_parallel=2", "gradient_accumulation_steps=8", "b=2")
    path = tmp_path / "run.toml"
    path.write_text(export(spec, "torchtitan", path).text)
    found = import_file(path)

    assert found is not None
    assert found.blocks["parallelism"]["pipeline_split"] == "layers"
    assert found.blocks["parallelism"]["schedule"] == "1f1b"
    assert found.blocks["training"]["micro_batch_size"] == 2
    assert found.blocks["training"]["global_batch_size"] == 2 * 8 * 2
