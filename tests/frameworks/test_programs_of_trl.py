"""Which of TRL's programs may run a file that names none: a guess never makes a run smaller."""

from __future__ import annotations

from pathlib import Path

import pytest

from memcalc.importers.loading import import_file, load

HEAD = """model_name_or_path: meta-llama/Llama-3.2-1B
per_device_train_batch_size: 2
bf16: true
gradient_checkpointing: true
output_dir: out
"""
ONE_RELEASE = ("versions.transformers=v5.23.0", "versions.trl=v1.16.0", "padding_mask=none")


def candidates(tmp_path: Path, fields: str) -> tuple[str, ...]:
    """The programs that are tried; the one that is assumed if there is no choice."""
    path = tmp_path / "config.yaml"
    path.write_text(HEAD + fields)
    imported = import_file(path, ONE_RELEASE)
    assert imported is not None
    asked = [question.candidates for question in imported.questions if question.field == "training.framework"]
    return asked[0] if asked else (str(imported.blocks["training"]["framework"]),)


@pytest.mark.parametrize(
    ("fields", "programs"),
    [
        ("block_size: 512\n", ("trainer",)),
        ("block_size: 512\ndataset_name: data\n", ("trainer",)),  # TRL rejects block_size
        ("model_max_length: 512\nuse_peft: true\n", ("trainer",)),
        ("max_length: 512\ndataset_name: data\n", ("trainer", "sft", "dpo")),
        ("max_seq_length: 512\ndataset_name: data\n", ("trainer", "sft")),
        ("max_length: 512\ndataset_text_field: text\n", ("trainer", "sft")),
        ("max_length: 512\npacking: true\n", ("sft",)),
        ("max_length: 512\nloss_type: nll\n", ("sft",)),
        ("max_length: 512\nloss_type: [ipo]\n", ("dpo",)),
        ("max_length: 512\nbeta: 0.1\n", ("dpo",)),
        ("max_length: 512\npadding_free: true\n", ("sft", "dpo")),
        ("max_length: 512\nmodel_init_kwargs: {}\n", ("sft", "dpo")),
        ("max_length: 512\nmax_prompt_length: 256\n", ("trainer", "dpo")),
        ("max_length: 512\ndisable_dropout: true\n", ("trainer", "dpo")),
        ("max_length: 512\nchat_template_path: a.jinja\n", ("sft", "reward")),
        ("max_length: 512\ncenter_rewards_coefficient: 0.01\n", ("reward",)),
        ("max_length: 512\nreward_funcs: [length]\n", ("grpo",)),
    ],
)
def test_the_programs_that_accept_the_fields(fields: str, programs: tuple[str, ...], tmp_path: Path) -> None:
    """TRL 1.16, trl/trainer/{sft,dpo,reward}_config.py: TRL's programs reject the fields of others."""
    assert candidates(tmp_path, fields) == programs


def test_a_file_that_dpo_may_run_has_its_reference(tmp_path: Path) -> None:
    """`trl sft` and `trl dpo` accept the same file; DPO has a second model, and two sequences for each of a pair."""
    path = tmp_path / "config.yaml"
    path.write_text(HEAD + "max_length: 512\ndataset_name: data\n")
    spec = load(path, ONE_RELEASE)

    assert spec.training.framework == "dpo"
    assert spec.training.reference_model
    assert spec.training.pairs
    (assumption,) = (each for each in spec.origin.assumptions if each.field == "training.framework")
    assert assumption.taken == "dpo"
    assert assumption.moved_bytes >= 2 * 1_235_814_400  # the reference in bf16, and more

    named = load(path, (*ONE_RELEASE, "framework=sft"))
    assert not named.training.reference_model
    assert "training.framework" not in {each.field for each in named.origin.assumptions}


@pytest.mark.parametrize(
    ("script", "programs"),
    [
        ("sft.py", ("trainer", "sft")),
        ("supervised_finetuning.py", ("trainer", "sft")),
        ("examples/finetune_lora.py", ("trainer", "sft")),
        ("run_clm.py", ("trainer", "sft")),
        ("train.py", ("trainer", "sft", "dpo")),
        ("train_dpo.py", ("trainer", "dpo")),
        ("sft_then_dpo.py", ("trainer", "dpo")),
    ],
)
def test_the_name_of_a_script_is_evidence_too(script: str, programs: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        f"accelerate launch {script} --model_name_or_path meta-llama/Llama-3.2-1B --max_length 512 --bf16 true "
        "--per_device_train_batch_size 2 --dataset_name data --output_dir out\n"
    )
    imported = import_file(path, ONE_RELEASE)
    assert imported is not None
    (question,) = (each for each in imported.questions if each.field == "training.framework")
    assert question.candidates == programs


def test_fields_of_a_program_count_more_than_a_scripts_name(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "accelerate launch finetune.py --model_name_or_path meta-llama/Llama-3.2-1B --max_length 512 --beta 0.1 "
        "--per_device_train_batch_size 2 --bf16 true --output_dir out\n"
    )
    assert load(path, ONE_RELEASE).training.framework == "dpo"
