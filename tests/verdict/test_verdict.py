"""The three answers: from bounds, from the replay, from recorded runs, and with parts that are not modelled."""

from collections.abc import Callable
from math import ceil, floor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc.estimation.outside_allocator import LEAST_FIRST_GROUP_BYTES, outside_bytes
from memcalc.layout.stages import stages_of
from memcalc.ledger.verdict import Answer, RecordedErrors, Verdict, observed
from memcalc.simulation.simulated_run import simulate
from memcalc.spec.hardware.gpus import find_gpu
from memcalc.spec.limits import Limit
from memcalc.stream.requests import AllocatorOverhead
from memcalc.verdict.judge import is_expected_to_fit, judge, size, verdict_of
from memcalc.verdict.needs import MemoryNeed, least_bytes, need_of
from memcalc.verdict.recorded_errors import ENOUGH, UNRECORDED, replay_errors, reserve_ratio
from memcalc.verdict.run_types import kinds_of, program_kinds
from tests.properties.specs import Config, configs, examples
from tests.records import RECORDS, pin_records

GIB = 2**30
CARD = find_gpu("h100-80gb")
PLAIN = "one GPU, plain modules"


def need(
    reserved: int, low: float, high: float, on_card: Answer | None = None, outside: tuple[int, int] = (GIB, GIB)
) -> MemoryNeed:
    errors = RecordedErrors("one GPU", 30, 0.001, high, low, high, replayed=True)
    finishes = None if on_card is None else on_card == "fits"
    return MemoryNeed(reserved, errors, max(outside), min(outside), AllocatorOverhead({}, reserved), on_card, finishes)


@pytest.mark.parametrize(
    ("limit", "answer"), [(113, "fits"), (112, "unknown"), (103, "unknown"), (102, "does-not-fit")]
)
def test_a_limit_and_the_least_and_most_of_the_communication_library(limit: int, answer: str) -> None:
    """100 GiB reserved, known exactly, beside 3 to 13 GiB of context and communicators."""
    found = verdict_of(need(100 * GIB, 0.0, 0.0, outside=(3 * GIB, 13 * GIB)), None, limit * GIB, 90 * GIB, ())

    assert found.answer == answer
    assert found.device_bytes == 113 * GIB


@pytest.mark.parametrize(
    ("limit", "answer", "expected"),
    [
        (1 + 102, "fits", True),  # 100 GiB and 2 % more, and 1 GiB outside the allocator
        (1 + 101, "unknown", True),
        (1 + 99, "unknown", False),
        (1 + 97, "does-not-fit", False),  # 100 GiB less 2 % is 98
    ],
)
def test_a_limit_and_the_interval(limit: int, answer: str, expected: bool) -> None:
    """A budget, which frees no cached blocks: 100 GiB reserved, 2 % on both sides."""
    found = verdict_of(need(100 * GIB, -0.02, 0.02), None, limit * GIB, 90 * GIB, ())

    assert (found.answer, found.expected) == (answer, expected)
    assert found.interval is not None
    assert found.interval.low_bytes <= found.interval.high_bytes
    assert found.interval.errors.run_type == "one GPU"


def test_the_interval_agrees_with_the_answer() -> None:
    """A run that gets through on a full card needs no more than the GPU, one that does not needs more."""
    usable = CARD.usable_bytes
    through = verdict_of(need(usable - GIB, -0.01, 0.01, "fits"), CARD, usable, GIB, ())
    dies = verdict_of(need(usable - GIB, -0.01, 0.01, "does-not-fit"), CARD, usable, GIB, ())

    assert (through.answer, through.interval and through.interval.high_bytes) == ("fits", usable)
    assert (dies.answer, dies.interval and dies.interval.low_bytes) == ("does-not-fit", usable + 1)


@pytest.mark.parametrize(
    ("limits", "answer"),
    [
        ((), "fits"),
        ((Limit("logging", holds_memory=False),), "fits"),
        ((Limit("a second model", holds_memory=True),), "unknown"),
        ((Limit("another kernel", holds_memory=True, at_most_bytes=20 * GIB),), "unknown"),  # 10 + 1 + 20 = 31
        ((Limit("a second model", holds_memory=True, at_least_bytes=19 * GIB),), "unknown"),  # 10 + 1 + 19 = 30
        ((Limit("a second model", holds_memory=True, at_least_bytes=20 * GIB),), "does-not-fit"),
    ],
)
def test_what_is_not_modelled(limits: tuple[Limit, ...], answer: str) -> None:
    """Unmodelled memory turns FITS into CANNOT SAY; a known lower bound can turn it into DOES NOT FIT."""
    found = verdict_of(need(10 * GIB, 0.0, 0.0), None, 30 * GIB, 11 * GIB, limits)

    assert found.answer == answer
    assert found.least_bytes == 11 * GIB + sum(limit.at_least_bytes for limit in limits)
    assert found.unmodelled == tuple(limit.feature for limit in limits if limit.holds_memory)
    assert observed(fits=True, device_bytes=11 * GIB, limit_bytes=30 * GIB, limits=limits).answer == answer


@pytest.mark.parametrize(("least", "answer"), [(29, "unknown"), (31, "does-not-fit")])
def test_what_is_counted_too_high(least: int, answer: str) -> None:
    """41 GiB are counted, of which the run may need fewer, but never fewer than the lower bound; the limit is 30 GiB."""
    limits = (Limit("frozen layers", holds_memory=False, overcounts="states"),)
    found = verdict_of(need(40 * GIB, 0.0, 0.0), None, 30 * GIB, least * GIB, limits)

    assert (found.answer, found.expected) == (answer, False)
    assert found.overcounted == (("frozen layers",) if answer == "unknown" else ())
    assert verdict_of(need(20 * GIB, 0.0, 0.0), None, 30 * GIB, GIB, limits).answer == "fits"
    assert observed(fits=False, device_bytes=GIB, limit_bytes=GIB, limits=limits).answer == "unknown"


def test_unmodelled_memory_that_is_small_enough_fits() -> None:
    """10 GiB and 1 GiB outside the allocator, and at most 19 GiB more, are 30 GiB."""
    limits = (Limit("another kernel", holds_memory=True, at_most_bytes=19 * GIB),)

    assert verdict_of(need(10 * GIB, 0.0, 0.0), None, 30 * GIB, 11 * GIB, limits).answer == "fits"
    more = (*limits, Limit("a second model", holds_memory=True))
    assert verdict_of(need(10 * GIB, 0.0, 0.0), None, 30 * GIB, 11 * GIB, more).answer == "unknown"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ((), "unknown"),
        (("dtype=fp16",), "unknown"),  # with grouped heads transformers passes enable_gqa, which needs flash attention
        (("dtype=fp16", "attention=memory-efficient"), "fits"),
        (("attention=memory-efficient",), "unknown"),  # in bf16 this kernel needs Ampere, too
        (("attention=eager",), "does-not-fit"),
        (("b=1", "s=256"), "fits"),  # even with all scores
    ],
)
def test_a_gpu_without_flash_attention(words: tuple[str, ...], answer: str) -> None:
    """PyTorch takes its math kernel on a T4 in bf16: 359 MiB instead of 9.3 MiB per layer of these sizes, recorded."""
    run = ("HuggingFaceTB/SmolLM2-135M", "b=6", "s=1024", "variable_lengths=false")

    assert memcalc.estimate(*run, *words, gpu="t4").verdict == answer
    assert memcalc.estimate(*run, *words, gpu="l4").verdict == "fits"


def test_a_run_that_died_does_not_fit_whatever_it_leaves_out() -> None:
    limits = (Limit("a second model", holds_memory=True),)

    assert observed(fits=False, device_bytes=GIB, limit_bytes=2 * GIB, limits=limits).answer == "does-not-fit"


def test_fits_follows_the_answer() -> None:
    answers: tuple[Answer, ...] = ("fits", "does-not-fit", "unknown")
    verdicts = [Verdict(answer, 1, 1, 1, None, answer == "fits") for answer in answers]

    assert [verdict.fits for verdict in verdicts] == [True, False, None]


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ((), (PLAIN, "one GPU")),
        (("implementation=huggingface",), ("one GPU, transformers modules", "one GPU")),
        (("lora.rank=8",), ("one GPU, LoRA", "one GPU")),
        (("qlora.block_size=64",), ("one GPU, QLoRA", "one GPU")),
        (("alloc_conf=expandable_segments:True",), ("one GPU, expandable segments",)),
        (("alloc_conf=max_split_size_mb:128",), ("one GPU, allocator settings",)),
        (("data_parallel=2",), ("DDP", "several GPUs")),
        (("data_parallel=2", "zero_stage=3"), ("FSDP2", "several GPUs")),
        (("data_parallel=2", "zero_stage=3", "offload=all"), ("offload to the host", "several GPUs")),
        (("data_parallel=2", "zero_stage=2"), ("DeepSpeed stage 2", "DeepSpeed", "several GPUs")),
        (("tensor_parallel=2",), ("tensor parallelism", "several GPUs")),
        (("inference.batch_size=1",), ("generation, modules of the family", "generation")),
    ],
)
def test_kinds(words: tuple[str, ...], kinds: tuple[str, ...]) -> None:
    assert kinds_of(memcalc.load("gpt2", *words)) == kinds


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ((), ()),
        (("training.framework=trainer",), ("frameworks' programs, one GPU", "frameworks' programs")),
        (
            ("training.framework=deepspeed", "engine=deepspeed", "data_parallel=2"),
            ("frameworks' programs, DeepSpeed", "frameworks' programs"),
        ),
        # recorded in programs alone, of one model definition: the errors of all programs
        (("engine=deepspeed", "pipeline_parallel=2"), ("frameworks' programs",)),
    ],
)
def test_kinds_of_programs(words: tuple[str, ...], kinds: tuple[str, ...]) -> None:
    assert program_kinds(memcalc.load("gpt2", *words)) == kinds


def test_a_kind_with_few_records_takes_those_of_the_next_wider_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pin_records(monkeypatch)

    assert replay_errors((PLAIN, "one GPU")).run_type == PLAIN
    assert replay_errors(("one GPU, LoRA", "one GPU")).run_type == "one GPU"
    assert reserve_ratio(("FSDP2", "several GPUs"))[1].run_type == "several GPUs"
    unknown = replay_errors(("generation",))
    assert (unknown.runs, unknown.low, unknown.high) == (0, -UNRECORDED, UNRECORDED)


def test_the_range_of_recorded_ratios_lies_around_their_median(monkeypatch: pytest.MonkeyPatch) -> None:
    pin_records(monkeypatch)
    found = RECORDS["reserved over allocated"]["several GPUs"]
    ratio, errors = reserve_ratio(("several GPUs",))

    assert ratio == found["median"]
    assert ratio * (1 + errors.low) == pytest.approx(found["least"])
    assert ratio * (1 + errors.high) == pytest.approx(found["most"])


def test_a_run_beyond_the_largest_device_of_the_allocator_model_is_not_replayed() -> None:
    result = size(memcalc.load("gpt2", "b=100000000", "alloc_conf=max_split_size_mb:128", gpu="h100-80gb"))

    assert (result.fits, result.confidence) == (False, "formula")
    assert (
        "Allocator not replayed: the run needs more than 1 PiB, the largest device of the allocator model."
        in result.notes
    )


def test_several_gpus_are_judged_by_recorded_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt2 over DDP: the interval of reserved memory is 1.05 to 1.2 times what is allocated."""
    pin_records(monkeypatch)
    result = size(memcalc.load("gpt2", "data_parallel=8", "optimizer=adam-4bit", "b=8", gpu="h100-80gb"))
    allocated, outside = result.ledger.peak_bytes, result.headline.outside
    around = outside.device_context + outside.communication_library

    assert outside.communication_library == 1536 * 2**20
    assert result.interval is not None
    assert result.headline.reserved_bytes == ceil(allocated * 1.1)
    assert result.interval.low_bytes == pytest.approx(
        floor(allocated * 1.05) + outside.device_context + 1024 * 2**20, abs=2
    )
    assert result.interval.high_bytes == pytest.approx(ceil(allocated * 1.2) + around, abs=2)
    assert result.confidence == "formula"
    assert any(note.startswith("Allocator not replayed: ") for note in result.notes)


@pytest.mark.parametrize(
    ("ratio", "answer"), [(0.99, "does-not-fit"), (1.01, "unknown"), (1.1, "unknown"), (1.21, "fits")]
)
def test_a_run_without_a_replay_may_fit_a_gpu_with_room_for_its_allocated_peak(
    monkeypatch: pytest.MonkeyPatch, ratio: float, answer: str
) -> None:
    """A full GPU frees cached blocks. The recorded runs, on larger GPUs, reserved 1.05 to 1.2 times their peak."""
    pin_records(monkeypatch)
    config = ("gpt2", "data_parallel=8", "optimizer=adam-4bit", "b=8")
    unlimited = memcalc.estimate(*config, gpu="h100-80gb").replayed
    peak, outside = unlimited.ledger.peak_bytes, unlimited.headline.outside
    around = outside.device_context + (LEAST_FIRST_GROUP_BYTES if ratio < 1 else outside.communication_library)

    found = judge(memcalc.load(*config, gpu=f"h100-80gb:{floor(peak * ratio) + around}B"))

    assert found.answer == answer
    if answer == "unknown":
        assert found.interval is not None
        assert found.interval.low_bytes <= found.limit_bytes < found.interval.high_bytes


@examples(30)
@given(configs(adapters=True), st.sampled_from(["t4", "a10g", "h100-80gb"]))
def test_the_quick_answer_is_that_of_the_estimate(config: Config, gpu: str) -> None:
    spec = memcalc.load(config, gpu=gpu)
    quick, whole = judge(spec), size(spec)

    assert quick.answer == whole.verdict
    assert quick.expected is is_expected_to_fit(spec)
    assert least_bytes(spec, find_gpu(gpu)) <= (whole.headline.device_bytes or 0)


FRAGMENTED = ("qwen2.5-0.5b", "recipe=pure", "recompute=full", "b=16")


def test_fragmentation_decides() -> None:
    """The peak of 69.1 GiB fits 78.4 GiB; what the allocator reserves for it does not, on a real allocator neither."""
    result = memcalc.estimate(*FRAGMENTED, gpu="a100-80gb")

    assert result.ledger.peak_bytes < 70 * GIB
    assert result.fits is False
    assert memcalc.estimate(*FRAGMENTED, gpu="a100-80gb", alloc_conf="expandable_segments:True").fits is True


def test_cached_blocks_are_freed_on_a_gpu_that_is_full() -> None:
    """Llama-3-8B reserves 84,162,904,064 bytes on 80 GB, as the null device recorded, and more without an end."""
    spec = memcalc.load("llama-3-8b", "b=1", "s=2048", "recipe=pure", gpu="a100-80gb")
    on_card, endless = need_of(spec, find_gpu("a100-80gb")), need_of(spec, None)

    assert on_card.replay_finishes
    assert on_card.reserved_bytes < endless.reserved_bytes
    assert on_card.device_bytes <= find_gpu("a100-80gb").usable_bytes


def test_the_replay_waits_until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    replay: Callable[..., Any] = size

    def counted(spec: memcalc.Spec) -> memcalc.Result:
        made.append(spec)
        return replay(spec)  # type: ignore[no-any-return]

    monkeypatch.setattr("memcalc.verdict.judge.size", counted)
    result = memcalc.estimate("gpt2", gpu="t4")
    assert result.ledger.peak_bytes > 0
    assert not made
    assert result.verdict == "fits"
    assert result.headline.reserved_bytes == result.replayed.headline.reserved_bytes
    assert len(made) == 1  # once for all that is read


def test_records_are_enough_for_common_runs() -> None:
    """No screen of a plain run, or of transformers' modules or LoRA, rests on a convention."""
    for words in ((), ("implementation=huggingface",), ("lora.rank=8",), ("qlora.block_size=64",)):
        assert replay_errors(kinds_of(memcalc.load("gpt2", *words))).runs >= ENOUGH


@pytest.mark.parametrize(
    ("schedule", "micro_batches"), [("1f1b", 4), ("1f1b", 5), ("gpipe", 4), ("interleaved", 4), ("interleaved", 5)]
)
def test_a_lower_bound_of_a_pipeline_is_no_more_than_its_replay(schedule: str, micro_batches: int) -> None:
    """With few micro-batches no gradients exist when the most are in flight, which the formulas count together."""
    chunks = "virtual_stages=2" if schedule == "interleaved" else "virtual_stages=1"
    words = ("pipeline_parallel=4", f"schedule={schedule}", chunks, f"global_batch_size={micro_batches}", "b=1")
    spec = memcalc.load("llama-3.2-1b", *words, "s=2048", "num_layers=16", "recipe=mixed-20", gpu="h100-80gb")

    allocated = max(most for stage in stages_of(spec) for most, _ in simulate(spec, stage=stage).tops.values())
    gpu = find_gpu("h100-80gb")
    assert least_bytes(spec, gpu) - outside_bytes(spec, gpu) <= allocated
