"""Which files of other programs compile the model, and which of them also record CUDA graphs."""

from pathlib import Path

import pytest

from memcalc.estimation.limits import limits_of
from memcalc.importers.loading import load

TRAINER = "model_name_or_path: meta-llama/Meta-Llama-3-8B\nper_device_train_batch_size: 2\nbf16: true\n"
AXOLOTL = "base_model: meta-llama/Meta-Llama-3-8B\nsequence_len: 1024\nmicro_batch_size: 2\ndatasets: []\n"
ACCELERATE = "distributed_type: 'NO'\nmixed_precision: bf16\nnum_processes: 1\n"
TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 2048\nlocal_batch_size = 1\n'
TUNE = (
    "model: {_component_: torchtune.models.llama3_1.llama3_1_8b}\ntokenizer: {max_seq_len: 2048}\n"
    "optimizer: {_component_: torch.optim.AdamW, fused: true}\nbatch_size: 1\ndtype: bf16\n"
)
PRETRAIN = "model_name: pythia-160m\nprecision: bf16-true\ntrain: {micro_batch_size: 4}\nmax_seq_length: 1024\n"
FINETUNE = "checkpoint_dir: checkpoints/EleutherAI/pythia-160m\nprecision: bf16-true\ntrain: {micro_batch_size: 1}\n"


@pytest.mark.parametrize(
    ("text", "compiled", "graphs"),
    [
        (TRAINER, False, False),
        (TRAINER + "torch_compile: false\n", False, False),
        (TRAINER + "torch_compile: true\n", True, False),
        (TRAINER + "torch_compile: true\ntorch_compile_mode: default\n", True, False),
        (TRAINER + "torch_compile: true\ntorch_compile_mode: max-autotune-no-cudagraphs\n", True, False),
        (TRAINER + "torch_compile: true\ntorch_compile_mode: max-autotune\n", True, True),
        (TRAINER + "torch_compile: true\ntorch_compile_mode: reduce-overhead\n", True, True),
        (AXOLOTL + "torch_compile: true\n", True, False),
        (AXOLOTL + "torch_compile: auto\n", True, False),
        (ACCELERATE + "dynamo_config: {dynamo_backend: INDUCTOR}\n", True, False),
        (ACCELERATE + "dynamo_config: {dynamo_backend: 'NO'}\n", False, False),
        (ACCELERATE + "dynamo_config: {dynamo_backend: EAGER}\n", False, False),  # traced, not compiled
        (ACCELERATE + "dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: reduce-overhead}\n", True, True),
        (TITAN + "[compile]\nenable = true\n", True, False),
        (TITAN + "[compile]\nenable = false\n", False, False),
        (TUNE + "compile: true\n", True, False),
        (TUNE + "compile: {model: true, loss: true}\n", True, False),
        (TUNE + "compile: {model: false, loss: true}\n", False, False),
        (PRETRAIN, True, False),  # litgpt/pretrain.py compiles every run
        (FINETUNE, False, False),
    ],
)
def test_files_that_compile(text: str, compiled: bool, graphs: bool, tmp_path: Path) -> None:
    path = tmp_path / ("run.toml" if text.startswith(TITAN) else "run.yaml")
    path.write_text(text)
    more = ("data_parallel=8",) if text.startswith(TITAN) else ()
    if text.startswith((ACCELERATE, PRETRAIN, FINETUNE)):
        more = ("preset=gpt2",)
    spec = load(path, more)

    assert spec.training.compile is compiled
    assert ("CUDA graphs" in {limit.feature for limit in limits_of(spec) if limit.holds_memory}) is graphs


def test_a_run_that_is_compiled_only_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(PRETRAIN)

    assert load(path, ("preset=gpt2", "compile=false")).training.compile is False
