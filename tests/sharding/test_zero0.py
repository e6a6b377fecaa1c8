"""What DeepSpeed allocates without ZeRO: by hand for a small model.

Real runs: tests/training_programs/test_programs.py, family deepspeed-stage0.
"""

from __future__ import annotations

from itertools import chain

import pytest

from memcalc.sharding.zero0 import BUFFER
from memcalc.sharding.zero12 import reduced_together
from memcalc.simulation.simulated_run import run_requests, unsupported_reason
from memcalc.spec.spec import Spec
from tests.sharding.small_model import VOCAB, WIDTH
from tests.sharding.test_deepspeed import ELEMENTS, LAYERS, MATRICES, asked, small

LARGE = [VOCAB * WIDTH, *MATRICES * LAYERS, VOCAB * WIDTH]  # elements of each matrix, in registration order
FP32 = ("recipe=fp32", "dtype=fp32")
OWN_ADAM = ("zero_optimization.own_adam=true", "optimizer_implementation=fused")


def whole(*words: str) -> Spec:
    return small("zero_stage=0", *words)


def found(spec: Spec, phase: str) -> list[int]:
    return [size for _, size in asked(spec, phase)]


def times(size: int) -> list[int]:
    """Bytes of each matrix, of a number of bytes an element."""
    return [size * each for each in LARGE]


def test_each_16_bit_weight_has_an_fp32_copy_from_a_clone() -> None:
    pairs = [(2 * each, 4 * each) for each in LARGE]

    assert found(whole(), "optimizer")[: 2 * len(LARGE)] == [*chain.from_iterable(pairs)]


def test_the_states_are_created_by_an_update_with_zeros() -> None:
    """Zeros for weights and for copies, two moments of each copy, then the square root of the second."""
    made = found(whole(), "optimizer")[2 * len(LARGE) :]
    moments = [*chain.from_iterable((each, each) for each in times(4))]

    assert made == [*times(2), *times(4), *moments, *times(4)]


def test_the_step_casts_all_gradients_then_updates() -> None:
    """The norm of each is of another fp32 copy, for a moment; no step creates states."""
    for phase in ("optimizer_step_1", "optimizer_step_2"):
        assert found(whole(), phase) == [*times(4), *times(4), *times(4)]


def test_deepspeeds_own_adam_updates_one_flat_tensor() -> None:
    """Clones, flattened; their clone on the way to the fp32 copy; its zeros and two moments, updated in place."""
    assert found(whole(*OWN_ADAM), "optimizer") == [*times(2), 2 * ELEMENTS, 2 * ELEMENTS, *[4 * ELEMENTS] * 4]
    assert found(whole(*OWN_ADAM), "optimizer_step_1") == [*times(4), 4 * ELEMENTS]


def test_fp32_weights_are_updated_themselves() -> None:
    """PyTorch's optimizer, which creates the states in the first step."""
    moments = [*chain.from_iterable((each, each) for each in times(4))]

    assert found(whole(*FP32), "optimizer") == []
    assert found(whole(*FP32), "optimizer_step_1") == [*moments, *times(4)]
    assert found(whole(*FP32), "optimizer_step_2") == times(4)


def test_fp32_gradients_have_norms_if_they_are_clipped() -> None:
    """One number for each parameter: 7 tensors a layer, the embedding, the last norm and the head."""

    def small_ones(*words: str) -> int:
        stretches = run_requests(whole(*FP32, *words), rank=0).stretches
        step = next(each for each in stretches if each.phase == "optimizer_step_2")
        return sum(size == 4 for size in step.script)

    assert small_ones("gradient_clipping=1.0") - small_ones() >= 7 * LAYERS + 3


@pytest.mark.parametrize(("words", "size"), [((), 2), (FP32, 4), (OWN_ADAM, 2)])
@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_are_flattened_after_the_last_backward(words: tuple[str, ...], size: int, steps: int) -> None:
    spec = whole(*words, f"gradient_accumulation_steps={steps}")
    scripts = [each.script for each in run_requests(spec, rank=0).stretches if each.phase == "backward_1"]

    assert [size * ELEMENTS in script for script in scripts] == [False] * (steps - 1) + [True]


def test_a_buffer_ends_once_it_is_full() -> None:
    """A gradient that makes it larger than 500 million elements is its last one."""
    assert [*reduced_together([BUFFER, 1, 5, BUFFER, 7], BUFFER, int)] == [[BUFFER, 1], [5, BUFFER], [7]]


@pytest.mark.parametrize("words", [(), FP32, OWN_ADAM, ("data_parallel=1",), ("lora.rank=8",)])
def test_it_is_replayed(words: tuple[str, ...]) -> None:
    assert unsupported_reason(whole(*words)) == ""
