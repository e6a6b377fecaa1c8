"""Memory over a run from the estimate's requests: the verdict's numbers, the ledger's components, the trace's curve."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.documents.timeline import timeline_document
from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.verdict.timeline import timeline_of
from tests.schemas import validate_result
from tests.thinning import quick_every

H100 = "h100-80gb"

# One of each type of run with known requests. Each is small, and its formulas agree with the replay.
RUNS = [
    ("gpt2", ("b=4",)),
    ("gpt2", ("recipe=amp", "implementation=huggingface", "b=2")),
    ("gpt2", ("optimizer=adafactor", "gradient_accumulation_steps=3", "recompute=full")),
    ("gpt2", ("data_parallel=8", "engine=ddp", "recipe=fp32")),
    ("gpt2", ("data_parallel=8", "engine=fsdp2", "zero_stage=3", "recipe=pure")),
    ("llama-3.2-1b", ("tensor_parallel=4", "recipe=pure")),
    ("llama-3.2-1b", ("finetune=lora", "lora.rank=16", "recipe=pure")),
    ("llama-3.2-1b", ("alloc_conf=expandable_segments:True", "recipe=mixed-16")),
    ("llama-3.2-1b", ("alloc_conf=max_split_size_mb:128", "recipe=mixed-16")),
]


@pytest.mark.parametrize(("config", "overrides"), RUNS)
def test_its_peak_and_its_reserved_memory_are_those_of_the_estimate(config: str, overrides: tuple[str, ...]) -> None:
    course = timeline_of(memcalc.load(config, *overrides, gpu=H100))
    result = memcalc.estimate(config, *overrides, gpu=H100).replayed
    assert course.reserved is not None

    assert course.peak_bytes == result.ledger.peak_bytes
    assert max(course.reserved) == result.headline.reserved_bytes


@pytest.mark.parametrize(("config", "overrides"), quick_every(2, RUNS, unpack=True))
def test_components_at_the_highest_point_of_each_phase_are_those_of_the_ledger(
    config: str, overrides: tuple[str, ...]
) -> None:
    """In the phases of a step; within 0.2%, or 2 MiB: scalars and tables that formulas count for their neighbors."""
    spec = memcalc.load(config, *overrides, gpu=H100)
    course, ledger = timeline_of(spec), memcalc.estimate(spec).replayed.ledger
    totals = course.totals
    for span in course.spans:
        if not span.phase.endswith(("_1", "_2")):
            continue
        if sum(other.phase == span.phase for other in course.spans) > 1:
            continue  # micro-batches: the ledger has the highest of them
        top = max(range(span.begin, span.end), key=totals.__getitem__)
        ours, theirs = course.timeline.by_component(top), ledger.components(span.phase)
        slack = max(0.002 * ledger.totals[span.phase], 2**21)
        for component in Component:
            if component is not Component.BLOCK_ROUNDING:
                assert abs(ours.get(component, 0) - theirs.get(component, 0)) <= slack, (span.phase, component)


@pytest.mark.parametrize(
    "overrides",
    [
        ("num_layers=2", "s=64", "vocab_size=512"),
        ("num_layers=2", "s=64", "vocab_size=512", "recipe=pure", "recompute=full", "gradient_accumulation_steps=2"),
    ],
)
def test_every_phase_rises_and_ends_as_in_the_trace(overrides: tuple[str, ...]) -> None:
    """The step run in PyTorch on fake tensors: allocated bytes at the end and at the top of each phase are equal."""
    pytest.importorskip("torch")
    from memcalc.cli.trace_output import recorded

    spec = memcalc.load("gpt2", *overrides, gpu="a100-40gb")
    ours, traced = timeline_of(spec).notebook(), recorded(memcalc.trace(spec)).curve.notebook()

    assert [line[:5] for line in ours] == [line[:5] for line in traced]


def test_the_document_keeps_every_peak_and_its_sums() -> None:
    """In points of one event and in few points."""
    course = timeline_of(memcalc.load("gpt2", "num_layers=2", "b=2", gpu=H100))
    every, few = (timeline_document(course, "gpt2", "estimate", points) for points in (10**6, 50))
    for document in (every, few):
        validate_result(document)
        points = document["points"]
        sums = [sum(parts) for parts in zip(*points["component_bytes"].values(), strict=True)]
        assert sums == points["allocated_bytes"]
        assert max(points["allocated_bytes"]) == document["peak"]["allocated_bytes"] == course.peak_bytes
        assert max(points["reserved_bytes"] or []) == document["peak"]["reserved_bytes"]
    assert len(every["points"]["begin"]) == every["events"] == len(course.totals)
    assert len(few["points"]["begin"]) == 50


def test_the_steps_are_those_of_a_trace() -> None:
    phases = [span.phase for span in timeline_of(memcalc.load("gpt2", gpu=H100)).spans]
    steps = [f"{phase}_{n}" for n in (1, 2, 3) for phase in "zero_grad forward loss backward optimizer_step".split()]
    assert phases == ["model", "optimizer", "input", *steps]


def test_a_run_that_its_gpu_cannot_hold_is_shown_to_its_end() -> None:
    """Llama 3 8B: 16 bytes for each of 8.03e9 parameters are 119.7 GiB, beyond the 79.1 GiB of an H100."""
    course = timeline_of(memcalc.load("llama-3-8b", "recipe=mixed-16", gpu=H100))
    assert len(course.totals) == len(course.timeline.events)
    assert course.limit is not None
    assert course.limit < 16 * 8.03e9 < course.peak_bytes


def test_a_run_without_known_requests_says_why() -> None:
    with pytest.raises(InputError, match=r"cannot be shown: .* pipeline parallelism.*\n?.*memcalc trace"):
        timeline_of(memcalc.load("gpt2", "pipeline_parallel=2", gpu=H100))


def test_a_pipeline_shows_the_stage_of_the_headline() -> None:
    """The last of eight stages, with the head and the loss, reserves most."""
    words = ("num_layers=8", "pipeline_parallel=8", "schedule=gpipe", "gradient_accumulation=8", "recipe=pure")
    result = memcalc.estimate("gpt2", *words, gpu="t4").replayed
    course = timeline_of(result.spec, result.headline)
    assert result.headline.rank == {"pipeline_stage": 7}
    assert course.peak_bytes == result.ledger.peak_bytes
    assert course.reserved is not None
    assert max(course.reserved) == result.headline.reserved_bytes
