"""A teacher: a frozen model with its own sizes that runs before the loss of each micro-batch."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.ledger.result import Result
from memcalc.sweeping.evaluation import evaluate
from tests.sweeping.test_evaluation import assert_same

LLAMA = ("llama-3.2-1b", "b=2", "s=512", "recipe=pure", "logits_until=loss", "num_layers=2")
THREE_B = 3_212_749_824  # parameters of Llama 3.2 3B, with a tied head


def estimate(*words: str) -> Result:
    return memcalc.estimate(*LLAMA, "teacher=llama-3.2-3b", *words)


def of_teacher(result: Result, phase: str, component: Component) -> int:
    rows = result.ledger.live_rows(phase, component)
    return sum(row.bytes for row in rows if row.module.startswith("teacher."))


@pytest.mark.parametrize(
    ("words", "width", "ranks"),
    [
        ((), 2, 1),
        (("teacher_dtype=fp32",), 4, 1),
        (("data_parallel=2", "zero_stage=0"), 2, 1),
        (("data_parallel=2", "zero_stage=3", "engine=fsdp2"), 2, 2),
    ],
    ids=["of the student", "its own", "replicated", "sharded"],
)
def test_its_weights_are_held_from_construction_on(words: tuple[str, ...], width: int, ranks: int) -> None:
    result = estimate(*words)

    for phase in ("model", "backward_2", "optimizer_step_2"):
        assert of_teacher(result, phase, Component.WEIGHTS) == width * THREE_B // ranks


def test_it_has_neither_gradients_nor_optimizer_states() -> None:
    ledger = estimate().ledger

    components = {row.component for row in ledger.rows if row.module.startswith("teacher.")}
    assert components <= {Component.WEIGHTS, Component.ACTIVATIONS, Component.LOGITS_AND_LOSS, Component.TEMPORARIES}


def test_its_forward_runs_in_the_loss_beside_the_students_graph() -> None:
    """Its logits exist in the loss alone: 2 bytes each of 2·512 tokens."""
    result = estimate()

    assert of_teacher(result, "forward_2", Component.LOGITS_AND_LOSS) == 0
    assert of_teacher(result, "backward_2", Component.LOGITS_AND_LOSS) == 0
    assert of_teacher(result, "loss_2", Component.LOGITS_AND_LOSS) == 2 * 2 * 512 * 128_256


@pytest.mark.parametrize("words", [(), ("data_parallel=2", "zero_stage=3", "engine=fsdp2")], ids=["one GPU", "FSDP2"])
def test_a_replay_has_the_same_tensors(words: tuple[str, ...]) -> None:
    """The replay differs from the formulas by unsplit remainders of blocks alone."""
    result = estimate(*words)

    replayed = result.replayed.headline
    assert replayed.reserved_bytes is not None
    assert replayed.reserved_bytes >= replayed.ledger.peak_bytes
    assert replayed.ledger.peak_bytes == pytest.approx(result.ledger.peak_bytes, rel=0.01)
    assert of_teacher(result.replayed, "loss_2", Component.WEIGHTS) == of_teacher(result, "loss_2", Component.WEIGHTS)


def test_a_preset_and_its_block_are_the_same_teacher() -> None:
    named = estimate()
    block = named.spec.training.teacher
    assert block is not None
    source = {"preset": "llama-3.2-1b", "training": {"teacher": block.model_dump(exclude_none=True)}}

    assert memcalc.load(source).training.teacher == block


def test_fields_of_a_block_override_those_of_its_preset() -> None:
    source = {"preset": "gpt2", "training": {"teacher": {"preset": "gpt2-medium", "num_layers": 3}}}
    teacher = memcalc.load(source).training.teacher

    assert teacher == memcalc.load("gpt2-medium", "num_layers=3").model


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("teacher=gpt2",), "the teacher's vocab_size = 50257 differs from the model's 128256"),
        (("loss=fused",), "loss = fused returns no logits, which a teacher is compared with"),
        (("pairs=true",), "pairs = true is not modelled with a teacher"),
        (("tensor_parallel=2",), "tensor_parallel = 2 is not modelled with a teacher"),
        (("teacher=no-such-model",), "teacher = 'no-such-model': no file, preset or hub id has this name"),
        (("teacher=null", "divergence=reverse"), "divergence = reverse needs a teacher. Set teacher, or leave"),
        (("teacher=null", "teacher_dtype=fp32"), "teacher_dtype = fp32 needs a teacher"),
    ],
)
def test_teachers_that_are_rejected(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        estimate(*words)


def test_under_deepspeed_the_order_of_requests_is_not_known() -> None:
    result = estimate("data_parallel=2", "zero_stage=2", "engine=deepspeed")

    assert result.replayed.confidence == "formula"


@pytest.mark.parametrize(
    ("words", "stay"),
    [
        (("fsdp.reshard_root=true",), False),
        (("fsdp.reshard_root=true", "torch_version=v2.7"), True),  # PyTorch before 2.8 ignores it for the root
        (("zero_stage=2",), True),
        ((), True),
    ],
)
def test_units_that_no_backward_reshards_are_a_limit(words: tuple[str, ...], stay: bool) -> None:
    result = estimate("data_parallel=2", "zero_stage=3", "engine=fsdp2", *words)

    limits = {limit.feature for limit in result.limits if limit.holds_memory}
    assert limits == ({"units of the second model that stay gathered between its forward passes"} if stay else set())


def test_an_evaluation_lacks_the_teacher() -> None:
    limits = {limit.feature: limit.holds_memory for limit in estimate("evaluation_batch_size=1").limits}

    assert limits["the teacher in evaluations"]


def test_tables_over_a_teacher_equal_single_estimates() -> None:
    axes: dict[str, Any] = {
        "divergence": ["forward", "symmetric"],
        "recompute": ["none", "full"],
        "b": [1, 2, 8],
        "s": [128, 512],
    }
    given = ("teacher=gpt2-medium", "recipe=pure")
    assert_same("gpt2", evaluate("gpt2", axes, *given), *given)
