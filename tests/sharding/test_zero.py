"""DeepSpeed's bucket and what its stage 3 gathers, simulated for models with sizes that can be added by hand."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.layout.gradient_order import first_rank_slice
from memcalc.layout.local_parameters import LocalParameters, stage_parameters
from memcalc.layout.stages import stages_of
from memcalc.ledger.component import Component
from memcalc.programs.sized_program import run_sizer
from memcalc.simulation.recorded_step import ChunkPasses, RecordedPasses
from memcalc.stream.peaks import peaks

# Llama-3.2-1B: a table of 128256 x 2048, which is the head, too; a layer of 2 norms of 2048, qkv 3072 x 2048,
# output 2048 x 2048 and three matrices of 8192 x 2048.
TABLE = 128256 * 2048
LAYER = 2 * 2048 + (3072 + 2048 + 3 * 8192) * 2048
NORM = 2048


def parameters_of(preset: str, *overrides: str) -> LocalParameters:
    spec = memcalc.load(preset, *overrides)
    return stage_parameters(spec, stages_of(spec)[0])


def recorded(preset: str, *words: str) -> RecordedPasses:
    spec = memcalc.load(preset, *words)
    stage = stages_of(spec)[0]
    return ChunkPasses(spec, stage, lambda run: run_sizer(run, None)).step(stage, exist=False)


def flattened(preset: str, *words: str) -> list[int]:
    """Bytes of each bucket that is flattened before its reduction in a backward, in order."""
    stream = recorded(preset, "recipe=mixed-16", "engine=deepspeed", "data_parallel=8", "b=1", "s=64", *words).stream
    return [kind.requested for kind in stream.made if getattr(kind.label, "tensor", "") == "flattened bucket"]


def test_a_bucket_that_the_table_would_overflow_is_reduced_first() -> None:
    """4 layers and the norm are 243,290,112 elements; with the table they would be 505,958,400, beyond 5e8.

    What is left at the end is the table alone: stage 3 needs no copy of one tensor with equal shards, stage 2 flattens
    what two ranks share.
    """
    inside = 4 * LAYER + NORM

    assert flattened("llama-3.2-1b", "num_layers=4", "zero_stage=3") == [2 * inside]


def test_a_gradient_larger_than_the_bucket_is_reduced_alone() -> None:
    """Llama-3-8B's head has 128256 x 4096 = 525,336,576 elements: it is in no flattened bucket."""
    assert max(flattened("llama-3-8b", "zero_stage=3")) <= 2 * 500_000_000


def test_the_bucket_is_full_after_so_many_layers() -> None:
    """8 layers and the norm are 486,574,080 elements; the ninth layer from the end overflows it with its second matrix."""
    first = flattened("llama-3.2-1b", "zero_stage=3")[0]

    assert 2 * (NORM + 8 * LAYER) <= first <= 2 * 500_000_000


def test_the_first_rank_s_share() -> None:
    """4 layers over 8 ranks: 63,244,800 elements, all of the table."""
    assert first_rank_slice(parameters_of("llama-3.2-1b", "num_layers=4"), 8) == (
        TABLE,
        (TABLE + 4 * LAYER + NORM) // 8,
    )


def gathered(preset: str, *words: str) -> dict[str, int]:
    """The most bytes of gathered parameters in each pass."""
    given = ("recipe=mixed-16", "engine=deepspeed", "zero_stage=3", "data_parallel=8", "b=1", "s=64", *words)
    passes = recorded(preset, *given)
    stream = passes.stream
    is_gathered = [getattr(kind.label, "tensor", "") == "parameters, gathered" for kind in stream.kinds]
    sizes = [kind.requested if gathered else 0 for kind, gathered in zip(stream.kinds, is_gathered, strict=True)]
    return {phase: peak.bytes for phase, peak in zip(stream.phases, peaks(stream, sizes, passes.rounds), strict=True)}


def test_a_small_model_is_gathered_whole_and_released_layer_by_layer() -> None:
    """All is used again before 1e9 other elements: in the loss everything is gathered, 2 bytes each."""
    found = gathered("llama-3.2-1b", "num_layers=4")

    assert found["loss"] == 2 * (TABLE + 4 * LAYER + NORM)


def test_views_keep_experts_weights_from_forward_on() -> None:
    """Mixtral's 2 layers of 8 experts, 3 matrices of 14336 x 4096 each, recorded on the null device: to the byte."""
    found = gathered("mixtral-8x7b", "num_layers=2")

    assert found["forward"] == 6_838_984_704
    assert found["backward"] == 7_600_250_880


def gradients(*overrides: str) -> tuple[Any, int]:
    result = memcalc.estimate("llama-3.2-1b", "recipe=mixed-16", "engine=deepspeed", "data_parallel=64", *overrides)
    return result.ledger, result.parameters


def test_stage_1_has_whole_gradients_until_backward_ends() -> None:
    """2 bytes per parameter at the end of backward; stage 2 has shares and what is on its way."""
    few = ("b=1", "s=64", "recompute=full")
    first, parameters = gradients("zero_stage=1", *few)
    second, _ = gradients("zero_stage=2", *few)

    # The rank's own gradients, those of the embedding, are allocated when the first of them are reduced.
    assert first.components("backward_2")[Component.GRADIENTS] == 2 * (parameters + TABLE)
    assert second.components("backward_2")[Component.GRADIENTS] < 2 * parameters // 2
    step = "optimizer_step_2"
    assert first.components(step)[Component.GRADIENTS] == second.components(step)[Component.GRADIENTS]


def test_stage_1_sums_micro_batches_in_whole_gradients() -> None:
    ledger, parameters = gradients("zero_stage=1", "gradient_accumulation_steps=2")

    assert ledger.components("forward_2")[Component.GRADIENTS] == 2 * parameters


def alive(phase: str, *overrides: str) -> dict[str, int]:
    """Bytes of what an engine holds in a phase, by name."""
    spread = ("recipe=mixed-16", "engine=deepspeed", "data_parallel=8", "b=1", "s=128")
    rows = memcalc.estimate("llama-3.2-1b", "num_layers=4", *spread, *overrides).ledger.live_rows(phase)
    return {row.tensor: row.bytes for row in rows if row.module == "engine"}


def test_stage_1_keeps_its_bucket_from_micro_batch_to_micro_batch() -> None:
    """Allocated at the first gradient, freed when the last micro-batch's are reduced (setup_buckets); 2 bytes each."""
    assert "reduce bucket" not in alive("forward_2", "zero_stage=1")
    assert alive("forward_2", "zero_stage=1", "gradient_accumulation_steps=2")["reduce bucket"] == 2 * 500_000_000
    assert "reduce bucket" not in alive("optimizer_step_2", "zero_stage=1", "gradient_accumulation_steps=2")


def test_stage_2_sums_whole_gradients_of_parameters_that_a_rank_has_a_part_of() -> None:
    """get_all_grad_tensors(params_in_partition): the first rank has a part of the embedding, and its whole gradient."""
    name, share = "gradients beyond the rank's shard", (TABLE + 4 * LAYER + NORM) // 8

    assert name not in alive("forward_2", "zero_stage=2")
    assert alive("forward_2", "zero_stage=2", "gradient_accumulation_steps=2")[name] == 2 * (TABLE - share)


def rows(tensor: str, *settings: str) -> int:
    given = ("zero_stage=3", "data_parallel=4", "engine=deepspeed", "recipe=mixed-16", "b=1", "s=256")
    found = memcalc.estimate("llama-3.2-1b", *given, *settings).ledger
    return sum(row.bytes for row in found.rows if row.tensor == tensor and "zero_grad_2" in row.phases)


def test_a_bucket_is_as_large_as_it_is_set() -> None:
    """transformers' "auto" is the square of the width: 2048 x 2048 elements of 16 bits, for 5e8 by default."""
    assert rows("reduce bucket") == 2 * 500_000_000
    assert rows("reduce bucket", "zero_optimization.reduce_bucket_size=4194304") == 2 * 2048**2


def test_what_is_prefetched_is_as_large_as_it_is_set() -> None:
    none, some, more = (
        gathered("llama-3.2-1b", "s=2048", f"zero_optimization.prefetch_bucket_size={size}")["forward"]
        for size in (0, 50_000_000, 10**9)
    )

    assert none < some < more


def test_small_parameters_stay_up_to_a_threshold() -> None:
    """The norms of 16 layers and the last one, 2048 elements each, 2 bytes; under a threshold of 0 none does."""
    words = ("s=2048", "zero_optimization.prefetch_bucket_size=0")
    some, none = (
        gathered("llama-3.2-1b", *words, f"zero_optimization.param_persistence_threshold={size}")["forward"]
        for size in (NORM, NORM - 1)
    )

    assert 0 < some - none <= 2 * (2 * 16 + 1) * NORM


def test_a_copy_of_fp32_weights_is_a_master_of_the_rank_s_share() -> None:
    given = ("recipe=fp32", "dtype=fp32", "zero_stage=3", "data_parallel=4", "engine=deepspeed", "s=256")
    plain, copied = (
        memcalc.estimate("llama-3.2-1b", *given, f"zero_optimization.copies_fp32_weights={each}")
        for each in ("false", "true")
    )

    held = [row.bytes for row in copied.ledger.rows if row.component is Component.MASTER_WEIGHTS]
    assert sum(held) == copied.parameters
    assert not any(row.component is Component.MASTER_WEIGHTS for row in plain.ledger.rows)


def test_sizes_of_zero_are_deepspeeds_alone() -> None:
    with pytest.raises(
        memcalc.InputError, match="the block zero_optimization needs engine = deepspeed, but engine = ddp"
    ):
        memcalc.estimate("gpt2", "zero_optimization.reduce_bucket_size=1000")
