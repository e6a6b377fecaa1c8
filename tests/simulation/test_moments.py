"""Formulas of pipeline stages beside the requests of the whole step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from memcalc.allocator.pytorch.constants import MIN_BLOCK, STREAM_SHIFT
from memcalc.api import load
from memcalc.errors import MemcalcError
from memcalc.estimation.transient import SharedPeakPhases, peak_bytes, spans
from memcalc.layout.stages import stages_of
from memcalc.programs.sized_program import run_sizer
from memcalc.simulation.moments import NONE, PART, WHOLE, BesideStates, moments_of
from memcalc.simulation.simulated_run import run_requests, unsupported_reason
from memcalc.spec.spec import Spec
from memcalc.states.model_states import state_peak

ROUNDING = 1e-5  # some KiB: small tensors of a unit, each in a block, may be one block in the requests


def pipeline(schedule: str, stages: int, micro_batches: int, *more: str, preset: str = "llama-3.2-1b") -> Spec:
    """Return a run with one sequence in each micro-batch."""
    ranks = 2 if any(each.startswith("data_parallel=") for each in more) else 1
    chunks = ["virtual_stages=2"] if schedule == "interleaved" else []
    batch = [f"pipeline_parallel={stages}", f"global_batch_size={ranks * micro_batches}", "b=1", "recipe=pure"]
    return load(preset, *batch, f"schedule={schedule}", *chunks, *more, gpu="h100-80gb")


def states_of(spec: Spec, stage: int) -> list[tuple[int, list[int], list[int]]]:
    """Return the micro-batches in flight, and the gradients and gathered parameters of each chunk, of each moment."""
    moments = moments_of(spec, stages_of(spec)[stage])
    return [
        (
            each.chunk.in_flight + sum(state.in_flight for state in each.states),
            [state.gradients for state in each.states],
            [state.parameters for state in each.states],
        )
        for each in moments
    ]


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "expected"),
    [
        # all of four micro-batches are in flight at the first backward; the second one meets the gradients of the first
        ("1f1b", 4, [(4, [NONE], [NONE]), (3, [WHOLE], [NONE])]),
        ("gpipe", 4, [(4, [NONE], [NONE]), (3, [WHOLE], [NONE])]),
        # a fifth forward runs before the second backward: four in flight, and gradients, which the states count
        ("1f1b", 5, [(4, [NONE], [NONE])]),
        ("1f1b", 1, [(1, [NONE], [NONE])]),
        # four micro-batches in two chunks; the second chunk has its gradients before the first chunk runs backward
        (
            "interleaved",
            4,
            [
                (8, [NONE, NONE], [NONE, NONE]),
                (7, [NONE, WHOLE], [NONE, NONE]),
                (6, [NONE, WHOLE], [NONE, NONE]),  # fewer in flight, but each backward has sent a gradient
                (5, [NONE, WHOLE], [NONE, NONE]),
                (4, [NONE, WHOLE], [NONE, NONE]),
                (3, [WHOLE, WHOLE], [NONE, NONE]),
            ],
        ),
    ],
)
def test_first_stage_of_four(
    schedule: str, micro_batches: int, expected: list[tuple[int, list[int], list[int]]]
) -> None:
    assert states_of(pipeline(schedule, 4, micro_batches), 0) == expected


def test_fsdp2_gathers_and_reduces_chunks_in_turn() -> None:
    spec = pipeline("interleaved", 4, 4, "engine=fsdp2", "data_parallel=2", "zero_stage=3")
    assert states_of(spec, 0) == [
        (8, [NONE, NONE], [PART, WHOLE]),  # a forward has resharded the first chunk, a backward gathers the second
        *((in_flight, [NONE, WHOLE], [PART, WHOLE]) for in_flight in (7, 6, 5)),
        (4, [NONE, PART], [WHOLE, NONE]),  # the second chunk is reduced, and resharded
        (3, [WHOLE, PART], [WHOLE, NONE]),
    ]


@pytest.mark.parametrize("preset", ["pythia-1.4b", "gpt-neox-20b", "falcon-40b"])
def test_a_gradient_of_parallel_attention_and_mlp_is_received(preset: str) -> None:
    """It is added to the gradient of the MLP's input, and so is gone before the attention's."""
    spec = pipeline("1f1b", 2, 4, "num_layers=6", "s=512", preset=preset)
    assert not unsupported_reason(spec)
    for stage in stages_of(spec):
        bound = max(state_peak(spec, stage), peak_bytes(spec, stage, spec.gpu, tails=False))
        assert bound == pytest.approx(requested_peak(spec, stage.index), rel=0.001)


def requested_peak(spec: Spec, stage: int) -> int:
    """Return the live blocks of a stage at the peak of its requests."""
    live = top = 0
    blocks: list[int] = []
    for interval in run_requests(spec, stages_of(spec)[stage]).stretches:
        for change in interval.script:
            if change < 0:
                live -= blocks[~change]
                continue
            size = change & ((1 << STREAM_SHIFT) - 1)
            blocks.append(-(-size // MIN_BLOCK) * MIN_BLOCK)
            live += blocks[-1]
            top = max(top, live)
    return top


def drawn(seed: int, count: int, *more: str) -> Iterator[Spec]:
    """Yield random pipelines that can be replayed."""
    draw = random.Random(seed)
    while count:
        stages = draw.choice((2, 4))
        micro_batches = draw.choice((1, stages, stages + 1, 2 * stages - 1, 2 * stages, 3 * stages))
        schedule = draw.choice(("1f1b", "gpipe", "interleaved"))
        sizes = (f"s={draw.choice((512, 2048))}", f"num_layers={draw.choice((8, 16))}")
        recompute, preset = draw.choice(("none", "full")), draw.choice(("llama-3.2-1b", "gpt2", "qwen2.5-0.5b"))
        stage = [f"zero_stage={draw.choice((2, 3))}"] if "engine=fsdp2" in more else []
        try:
            spec = pipeline(
                schedule, stages, micro_batches, *sizes, f"recompute={recompute}", *more, *stage, preset=preset
            )
        except MemcalcError:  # an interleaved schedule with too few layers
            continue
        if not unsupported_reason(spec):
            count -= 1
            yield spec


@pytest.mark.parametrize(("first", "after"), [(0, 6), pytest.param(6, 25, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("more", "lowest"),
    [
        ((), -0.01),
        (("engine=fsdp2", "data_parallel=2"), -0.04),
        (("tensor_parallel=2", "sequence_parallel=true"), -0.02),
        (("tensor_parallel=2", "engine=fsdp2", "data_parallel=2"), -0.04),
    ],
    ids=["one rank", "fsdp2", "split", "split, fsdp2"],
)
def test_formulas_are_close_below_the_requests(more: tuple[str, ...], lowest: float, first: int, after: int) -> None:
    """They decide "does not fit" without a replay, so they must not be above it."""
    for spec in islice(drawn(20261129, after, *more), first, None):
        for stage in stages_of(spec):
            bound = max(state_peak(spec, stage), peak_bytes(spec, stage, spec.gpu, tails=False))
            error = bound / requested_peak(spec, stage.index) - 1
            assert lowest <= error < ROUNDING, (spec.parallelism, stage.index, error)


def test_chunks_of_a_stage_keep_their_own_activations() -> None:
    """Of 6 layers in 4 chunks, the first stage has 2 and 1. At its first backward 3 and 2 micro-batches are in flight."""
    spec = pipeline("interleaved", 2, 4, "num_layers=6", "s=512")
    first = moments_of(spec, stages_of(spec)[0])[0]
    rows = first.rows(spec, stages_of(spec)[0], run_sizer(spec, None))
    inputs = [row.count for row in rows if row.tensor == "layer input"]

    assert (first.chunk.stop - first.chunk.first, first.chunk.in_flight) == (1, 2)
    assert inputs == [2 * 3]


PEAKED = (
    ("interleaved", 4, 4, "num_layers=16"),
    ("interleaved", 4, 12, "num_layers=16", "engine=fsdp2", "data_parallel=2", "zero_stage=3"),
    ("interleaved", 2, 3, "num_layers=6", "s=512", "recompute=full"),
    ("interleaved", 4, 4, "num_layers=16", "engine=fsdp2", "data_parallel=2", "zero_stage=2", "s=16", "recompute=full"),
    ("interleaved", 2, 8, "num_layers=8", "engine=fsdp2", "data_parallel=2", "zero_stage=3", "s=8", "recompute=full"),
    ("1f1b", 4, 4, "recompute=every-3"),
    ("gpipe", 4, 6, "engine=fsdp2", "data_parallel=2", "zero_stage=2"),
    ("1f1b", 2, 8, "engine=deepspeed", "data_parallel=2", "zero_stage=1", "implementation=huggingface"),
    ("interleaved", 4, 8, "implementation=megatron", "recipe=mixed-18", "num_layers=16"),
)


@pytest.mark.parametrize("run", PEAKED, ids=str)
def test_two_evaluations_tell_the_peaks_of_all_moments_of_a_chunk(run: tuple[Any, ...]) -> None:
    """Those with the most micro-batches in flight, and with one."""
    schedule, stages, micro_batches, *more = run
    spec = pipeline(schedule, stages, micro_batches, *more)
    for stage in stages_of(spec):
        for span in spans(spec, stage, spec.gpu):
            every = [each.peak(span.phase, span.mask, first=span.first) for each in span.recorded]
            found = span.highest()

            assert found.passes is max(every, key=lambda peak: peak.bytes).passes
            assert span.heights() == [each.bytes for each in every]


class Passes:
    """Passes with 10 bytes besides those in flight until these are freed, and 25 afterwards."""

    of = "recording"

    def __init__(self, in_flight_bytes: int) -> None:
        self.in_flight_bytes = in_flight_bytes

    @property
    def alone(self) -> Passes:
        return Passes(0)

    def peak(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(peak=SimpleNamespace(bytes=max(10 + self.in_flight_bytes, 25)))

    def beside_bytes(self, _: int) -> int:
        return 1000 - self.in_flight_bytes


@pytest.mark.parametrize("in_flight", [(0, 5, 20, 30), (5, 10), (20, 30), (0,)])
def test_a_peak_may_follow_the_release_of_what_is_in_flight(in_flight: tuple[int, ...]) -> None:
    recorded: Any = [Passes(each) for each in in_flight]
    heights = SharedPeakPhases(1, recorded, "backward", first=False).heights()

    assert heights == [max(10 + each, 25) + 1000 - each for each in in_flight]


@pytest.mark.parametrize("run", PEAKED, ids=str)
def test_the_sums_of_a_moment_are_those_of_its_rows(run: tuple[Any, ...]) -> None:
    schedule, stages, micro_batches, *more = run
    spec = pipeline(schedule, stages, micro_batches, *more)
    for stage in stages_of(spec):
        held = BesideStates(spec, stage, run_sizer(spec, spec.gpu))
        for moment in moments_of(spec, stage):
            sums: dict[int, int] = {}
            for row in held.rows(moment):
                sums[row.mask] = sums.get(row.mask, 0) + row.count * row.block

            assert {mask: size for mask, size in held.sums(moment).items() if size} == sums
