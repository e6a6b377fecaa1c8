"""TRL's RewardTrainer: a head with one output, both sequences of a pair in one forward, no logits of the vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.layout.parameters import count_parameters
from memcalc.ledger.component import Component

FILE = """\
model_name_or_path: HuggingFaceTB/SmolLM2-135M
max_length: 512
per_device_train_batch_size: 2
gradient_checkpointing: false
center_rewards_coefficient: 0.01
"""
NAMED = ("framework=reward", "versions.transformers=v5.23.0", "versions.trl=v1.16.0", "padding_mask=none")
D = 576
SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1024, "tie_word_embeddings": False}


def sized(folder: Path, text: str, *settings: str) -> memcalc.Result:
    path = folder / "run.yaml"
    path.write_text(text)
    return memcalc.estimate(path, *settings)


def test_a_reward_model_has_a_score_in_place_of_the_head(tmp_path: Path) -> None:
    """SmolLM2's head is tied, so a vector of d weights comes on top; four sequences are in a forward of two pairs."""
    spec = sized(tmp_path, FILE, *NAMED).spec

    assert (spec.model.num_labels, spec.training.sequences, spec.training.loss) == (1, 4, "materialized")
    tied = spec.model.model_copy(update={"num_labels": 0, "tie_word_embeddings": True})
    assert count_parameters(spec.model) == count_parameters(tied) + D


def test_the_head_holds_a_score_of_each_token_and_no_logits(tmp_path: Path) -> None:
    """The last norm keeps two fp32 hidden states of four sequences; of the scores one of each is chosen."""
    result = sized(tmp_path, FILE, *NAMED)

    rows = [row for row in result.ledger.rows if row.component is Component.LOGITS_AND_LOSS]
    assert max(row.bytes for row in rows) == 4 * 4 * 512 * D
    assert {row.bytes for row in rows if row.tensor == "pooled scores"} == {2 * 4}
    assert not any("V" in row.formula for row in rows)


@pytest.mark.parametrize("settings", ["--lora_task_type", "center_rewards_coefficient"])
def test_fields_of_reward_models_name_the_program(settings: str, tmp_path: Path) -> None:
    fields = {"--lora_task_type": "lora_task_type: SEQ_CLS\nuse_peft: true\n", "center_rewards_coefficient": ""}
    text = FILE if not fields[settings] else FILE.replace("center_rewards_coefficient: 0.01\n", fields[settings])
    spec = sized(tmp_path, text).spec

    assert spec.training.framework == "reward"
    assert not any(limit.holds_memory for limit in spec.origin.limits)


def test_peft_trains_the_score_beside_its_adapters(tmp_path: Path) -> None:
    text = FILE + "use_peft: true\nlora_task_type: SEQ_CLS\n"
    result = sized(tmp_path, text, *NAMED)

    assert any(row.module == "score.saved" and row.component is Component.OPTIMIZER_STATE for row in result.ledger.rows)


@pytest.mark.parametrize(
    ("model", "training", "words"),
    [
        (
            {"tie_word_embeddings": True},
            {},
            (
                "configuration: model.tie_word_embeddings: num_labels = 1 makes a classification head, which does not "
                "support tie_word_embeddings = true. Set tie_word_embeddings: false, or num_labels: 0."
            ),
        ),
        (
            {},
            {"loss": "chunked"},
            (
                "configuration: training.loss: num_labels = 1 makes a classification head, which does not support loss "
                "= "
                "chunked. Set loss: materialized, or num_labels: 0."
            ),
        ),
        (
            {},
            {"implementation": "megatron"},
            (
                "configuration: training.implementation: num_labels = 1 makes a classification head, which does not "
                "support implementation = megatron. Set implementation: plain or huggingface, or num_labels: 0."
            ),
        ),
    ],
)
def test_what_a_head_with_labels_has_no_place_for(model: dict[str, bool], training: dict[str, str], words: str) -> None:
    run = {"model": SIZES | {"num_labels": 1} | model, "training": training}
    with pytest.raises(InputError) as raised:
        memcalc.estimate(run)

    assert words in str(raised.value)


def test_the_step_does_not_run_a_head_with_labels() -> None:
    pytest.importorskip("torch")
    with pytest.raises(InputError, match="num_labels = 1, but the step trains models with an LM head"):
        memcalc.trace({"model": SIZES | {"num_labels": 1}, "training": {"sequence_length": 16}})


def test_a_sweep_over_labels_is_the_estimate_of_each() -> None:
    table = memcalc.sweep({"model": SIZES, "training": {"sequence_length": 64}}, {"model.num_labels": [0, 1, 8]})

    for number, labels in enumerate((0, 1, 8)):
        run = {"model": SIZES | {"num_labels": labels}, "training": {"sequence_length": 64}}
        assert table.peak_bytes[number] == memcalc.estimate(run).ledger.peak_bytes
