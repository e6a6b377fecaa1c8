"""Megatron-DeepSpeed's scripts: Megatron's modules under DeepSpeed's pipeline engine."""

from pathlib import Path

import pytest

from memcalc.importers.loading import load
from memcalc.layout.stages import stages_of
from memcalc.spec.spec import Spec
from memcalc.spec.zero import runs_bf16_optimizer

GPT = "--num-layers 6 --hidden-size 512 --num-attention-heads 8 --pad-vocab-size-to 1024 --seq-length 256"
GPT += " --max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 32"
RANKS = "--nproc_per_node 8 --nnodes 1"


def spec_of(folder: Path, arguments: str, *overrides: str, program: str = "pretrain_gpt.py", before: str = "") -> Spec:
    path = folder / "train.slurm"
    path.write_text(f"{before}\npython -m torch.distributed.run {RANKS} {program} {GPT} --deepspeed {arguments}\n")
    return load(path, overrides)


def holding(spec: Spec) -> set[str]:
    return {limit.feature for limit in spec.origin.limits if limit.holds_memory}


def test_bloom(tmp_path: Path) -> None:
    """BigScience's train/tr11-176B-ml, with smaller sizes: 4 stages of 2 layers, of which two are the ends."""
    bloom = "--bf16 --zero-stage 0 --embed-layernorm --position-embedding-type alibi --checkpoint-activations"
    bloom += " --pipeline-model-parallel-size 4 --pp-partition-method 'type:transformer|embedding'"
    spec = spec_of(tmp_path, bloom)
    training, parallelism = spec.training, spec.parallelism

    assert (training.implementation, training.attention, training.recompute) == ("plain", "eager", "full")
    assert (spec.model.position_embedding, spec.model.embedding_norm, training.dropout) == ("alibi", True, 0.1)
    assert (training.recipe, training.dtype) == ("mixed-20", "bf16")
    assert (parallelism.engine, parallelism.zero_stage, parallelism.data_parallel) == ("deepspeed", 1, 2)
    assert runs_bf16_optimizer(spec)
    assert [stage.layers for stage in stages_of(spec)] == [1, 2, 2, 1]
    assert holding(spec) == set()


def test_fp16_runs_at_the_zero_stage_of_the_script(tmp_path: Path) -> None:
    """arguments.py: --zero-stage is 1 if it is not given."""
    first, none = (spec_of(tmp_path, f"--fp16 {stage}") for stage in ("", "--zero-stage 0"))

    assert (first.training.recipe, first.parallelism.zero_stage) == ("mixed-16", 1)
    assert (none.training.recipe, none.parallelism.zero_stage) == ("mixed-16", 0)
    assert (none.parallelism.zero_optimization.own_adam, none.training.logits_dtype) == (True, "fp32")


@pytest.mark.parametrize("unknown", ["", '"steps_per_print": $STEPS,'])
def test_the_config_that_the_script_writes(unknown: str, tmp_path: Path) -> None:
    """Its variables are those of the script; what the script does not set is left out."""
    config = f'{{{unknown} "zero_optimization": {{"stage": $ZERO, "reduce_bucket_size": 1000}}}}'
    before = f"ZERO=0\ncat <<EOT > ds.json\n{config}\nEOT"
    spec = spec_of(tmp_path, "--fp16 --zero-stage 1 --deepspeed_config ds.json", before=before)

    assert spec.parallelism.zero_stage == 0
    assert spec.parallelism.zero_optimization.reduce_bucket_size == 1000
    assert not any("not in the script" in note for note in spec.origin.notes)


def test_what_the_config_has_and_is_not_modelled(tmp_path: Path) -> None:
    before = 'cat <<EOT > ds.json\n{"zero_optimization": {"stage": 1}, "compile": {"deepcompile": true}}\nEOT'

    assert holding(spec_of(tmp_path, "--fp16", before=before)) == {"DeepSpeed's compiler"}


@pytest.mark.parametrize(
    ("program", "arguments", "tensors"),
    [
        ("pretrain_gpt.py", "", "hidden-states"),
        ("finetune_t0.py", "", "with-masks"),
        ("pretrain_prefix_lm.py", "", "with-masks"),
        ("pretrain_gpt.py", "--no-pipeline-parallel", "none"),
    ],
)
def test_masks_are_passed_on_by_programs_that_are_not_causal(
    program: str, arguments: str, tensors: str, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, f"--fp16 {arguments}", program=program)

    assert spec.parallelism.pipeline_tensors == tensors
    assert spec.parallelism.has_pipeline_engine == (tensors != "none")


def test_a_gated_mlp_keeps_its_size(tmp_path: Path) -> None:
    """glu_activations.py halves 2 x ffn_hidden_size features, which are 4 x hidden_size without two thirds."""
    spec = spec_of(tmp_path, "--fp16 --glu-activation swiglu --no-bias-gelu-fusion")

    assert (spec.model.mlp, spec.model.intermediate_size) == ("swiglu", 4 * 512)
    assert holding(spec_of(tmp_path, "--fp16 --glu-activation liglu")) == {"the activation liglu"}


@pytest.mark.parametrize(
    ("arguments", "limits"),
    [
        ("--fp16", set()),
        ("--fp16 --no-masked-softmax-fusion", {"the softmax of attention in fp32"}),
        ("--fp16 --no-masked-softmax-fusion --no-query-key-layer-scaling", set()),
        ("--fp16 --checkpoint-activations --checkpoint-num-layers 2", {"several layers in one checkpoint segment"}),
        ("--fp16 --pp-partition-method parameters", {"the pipeline split parameters"}),
    ],
)
def test_what_is_not_modelled(arguments: str, limits: set[str], tmp_path: Path) -> None:
    assert holding(spec_of(tmp_path, arguments)) == limits


def test_more_stages_than_layers(tmp_path: Path) -> None:
    """BigScience's train/tr13-mtf trains 70 layers on 72 stages: embedding and LM head are alone on theirs."""
    spec = spec_of(
        tmp_path, "--fp16 --pipeline-model-parallel-size 8 --pp-partition-method 'type:transformer|embedding'"
    )

    assert [stage.layers for stage in stages_of(spec)] == [0, 1, 1, 1, 1, 1, 1, 0]


def test_without_deepspeed_a_norm_after_the_embedding_is_not_modelled(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"torchrun pretrain_gpt.py {GPT} --bf16 --embed-layernorm\n")

    assert holding(load(path)) == {"a norm after the embedding"}
