"""torchtune's recipes with a second model: pairs and their reference, a teacher, reinforcement learning."""

from __future__ import annotations

from pathlib import Path

import pytest

from memcalc.estimation.limits import limits_of
from memcalc.importers.loading import load
from memcalc.layout.parameters import count_parameters
from memcalc.spec.limits import Limit
from memcalc.spec.spec import Spec

ONE_B = "torchtune.models.llama3_2.llama3_2_1b"
LORA = "torchtune.models.llama3_2.lora_llama3_2_1b, lora_rank: 8, lora_attn_modules: [q_proj]"
BASE = "tokenizer: {max_seq_len: 512}\nbatch_size: 2\ndtype: bf16\noptimizer: {_component_: torch.optim.AdamW}\n"
PPO = (
    "tokenizer: {max_seq_len: 512}\nbatch_size: 64\nppo_batch_size: 16\ngradient_accumulation_steps: 4\ndtype: bf16\n"
    f"optimizer: {{_component_: torch.optim.AdamW}}\npolicy_model: {{_component_: {ONE_B}}}\n"
    "reward_and_value_model: {_component_: torchtune.modules.classifier_model}\n"
    "ref_policy_checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer}\n"
    "loss: {_component_: torchtune.rlhf.loss.PPOLoss}\n"
)


def pairs(model: str, loss: str) -> str:
    return f"{BASE}model: {{_component_: {model}}}\nloss: {{_component_: torchtune.rlhf.loss.{loss}}}\n"


def distilled(teacher: str, divergence: str) -> str:
    return (
        f"{BASE}model: {{_component_: {LORA}}}\nteacher_model: {{_component_: torchtune.models.{teacher}}}\n"
        "teacher_checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer}\nkd_ratio: 0.5\n"
        "loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}\n"
        f"kd_loss: {{_component_: torchtune.modules.loss.{divergence}}}\n"
    )


def loaded(tmp_path: Path, text: str, *words: str) -> Spec:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load(path, words)


def holding(spec: Spec) -> dict[str, Limit]:
    return {limit.feature: limit for limit in limits_of(spec) if limit.holds_memory}


@pytest.mark.parametrize("loss", ["DPOLoss", "RSOLoss"])
def test_a_policy_with_adapters_scores_pairs_itself(loss: str, tmp_path: Path) -> None:
    """recipes/lora_dpo_single_device.py: the variable `_` references the logits of the rejected sequences."""
    spec = loaded(tmp_path, pairs(LORA, loss))
    training = spec.training

    assert (training.pairs, training.loss, training.logits_dtype) == (True, "gathered", "fp32")
    assert (training.reference_model, training.reference_logits_until, training.scored_apart) == (False, "step", False)
    assert holding(spec) == {}


def test_a_whole_policy_has_a_reference_model(tmp_path: Path) -> None:
    """recipes/full_dpo_distributed.py: chosen and rejected sequences apart; the reference's logits are deleted."""
    text = pairs(ONE_B, "DPOLoss")
    spec = loaded(tmp_path, text + "ref_checkpointer: {_component_: torchtune.x}\n", "data_parallel=2")
    training = spec.training

    assert (training.reference_model, training.reference_logits_until, training.scored_apart) == (True, "loss", True)
    assert (spec.parallelism.engine, spec.parallelism.fsdp.reshard_root) == ("fsdp2", True)
    assert holding(spec) == {}


def test_other_losses_of_pairs_are_a_limit(tmp_path: Path) -> None:
    assert holding(loaded(tmp_path, pairs(LORA, "SimPOLoss"))).keys() == {"pairs of sequences"}


@pytest.mark.parametrize(("reshards", "root"), [("true", True), ("false", False)])
def test_the_root_is_resharded_as_the_layers_are(reshards: str, root: bool, tmp_path: Path) -> None:
    """training/_distributed.py, shard_model: reshard_after_forward is given for every module, the root included."""
    text = pairs(LORA, "DPOLoss") + f"fsdp_reshard_after_forward: {reshards}\n"

    assert loaded(tmp_path, text, "data_parallel=2").parallelism.fsdp.reshard_root is root
    assert not loaded(tmp_path, text, "data_parallel=2", "engine=ddp", "zero_stage=0").parallelism.fsdp.reshard_root


@pytest.mark.parametrize("kind", ["Forward", "Reverse", "Symmetric"])
@pytest.mark.parametrize("chunked", ["WithChunkedOutput", ""])
def test_a_teacher_is_a_model_of_its_own(kind: str, chunked: str, tmp_path: Path) -> None:
    text = distilled("llama3_2.llama3_2_3b", f"{kind}KL{chunked}Loss")
    spec = loaded(tmp_path, text)
    teacher = spec.training.teacher

    assert teacher is not None
    assert (teacher.num_layers, teacher.hidden_size, teacher.fused_qkv) == (28, 3072, False)
    assert spec.training.divergence == kind.lower()
    assert holding(spec) == {}


def test_a_teacher_that_memcalc_does_not_know_is_a_limit(tmp_path: Path) -> None:
    text = distilled("llama9.llama9_1b", "ForwardKLLoss")

    assert holding(loaded(tmp_path, text)).keys() == {"the teacher"}
    own = text.replace("ForwardKLLoss", "OtherLoss").replace("llama9.llama9_1b", "llama3_2.llama3_2_3b")
    assert holding(loaded(tmp_path, own)).keys() == {"the divergence from a teacher"}


def test_reinforcement_learning_is_at_least_the_policy_and_its_copy(tmp_path: Path) -> None:
    """recipes/ppo_full_finetune_single_device.py: 16 sequences in 4 parts; the reference is in bf16."""
    spec = loaded(tmp_path, PPO)
    limits = holding(spec)

    assert spec.training.micro_batch_size == 4
    assert limits.keys() == {"reinforcement learning", "the reference model", "the reward model and the value model"}
    assert limits["the reference model"].at_least_bytes == 2 * count_parameters(spec.model)
