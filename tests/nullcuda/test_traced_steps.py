"""`trace` on fake tensors against `trace` on the null device: two ways to the same allocations.

The null device runs PyTorch's CUDA build; nothing of its streams is ours. What may differ is the order in which
neighboring releases come where PyTorch itself leaves it to addresses: autocast's cache.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.events import Event, EventType
from memcalc.ledger.component import Component
from memcalc.recorder.trace import Trace

TWO_LAYERS = ("l=2", "V=3000", "b=1", "s=512")
MIXTURE = ("l=1", "d=256", "h=4", "model.num_key_value_heads=2", "model.head_dim=64", "V=3000", "b=2", "s=512")

CASES = {
    "gpt2 plain, dropout": ("a100-80gb", "gpt2", "recipe=pure", "training.dropout=0.1", *TWO_LAYERS),
    "gpt2 huggingface, eager, fused": (
        "h100-80gb",
        "gpt2",
        "implementation=huggingface",
        "recipe=fp32",
        "training.dtype=fp32",
        "training.attention=eager",
        "training.optimizer_implementation=fused",
        *TWO_LAYERS,
    ),
    "llama plain, memory-efficient, every second layer": (
        "h100-80gb",
        "llama-3.2-1b",
        "recipe=mixed-20",
        "training.attention=memory-efficient",
        "training.recompute=every-2",
        *TWO_LAYERS,
    ),
    "llama huggingface, recompute, accumulation": (
        "a100-80gb",
        "llama-3.2-1b",
        "implementation=huggingface",
        "recipe=mixed-18",
        "training.recompute=full",
        "training.gradient_accumulation_steps=2",
        *TWO_LAYERS,
    ),
    "qwen3 plain, amp": ("a100-80gb", "qwen3-8b", "recipe=amp", "d=1024", *TWO_LAYERS),
    "llama split over ranks, along the sequence too, logits apart": (
        "h100-80gb",
        "llama-3.2-1b",
        "recipe=pure",
        "tensor_parallel=4",
        "sequence_parallel=true",
        "loss=vocab-parallel",
        *TWO_LAYERS,
    ),
    "gpt2 split over ranks, eager, recompute": (
        "a100-80gb",
        "gpt2",
        "recipe=mixed-16",
        "attention=eager",
        "recompute=full",
        "training.dropout=0.1",
        "tensor_parallel=2",
        *TWO_LAYERS,
    ),
    "mixture of experts": ("a100-80gb", "mixtral-8x7b", "recipe=pure", *MIXTURE),
}


QUICK = ("gpt2 plain, dropout",)
MARKS = {name: pytest.mark.long for name in CASES if name not in QUICK}


def stream(trace: Trace) -> list[tuple[str, int | str]]:
    """Sizes allocated and freed, phase by phase; releases that follow each other in the order of their size."""
    sizes: dict[int, int] = {}
    found: list[tuple[str, int | str]] = []
    for event in trace.events:
        if event.kind is EventType.ALLOC:
            sizes[event.storage] = event.bytes
            found.append(("+", event.bytes))
        elif event.kind is EventType.FREE:
            found.append(("-", sizes[event.storage]))
        else:
            found.append((event.kind, event.phase))
    ordered: list[tuple[str, int | str]] = []
    for frees, alike in groupby(found, lambda entry: entry[0] == "-"):
        run = list(alike)
        ordered += sorted(run) if frees else run
    return ordered


def attributed(events: tuple[Event, ...]) -> list[tuple[str, str, str, str]]:
    """What allocations are said to be, in order, but for what is taken inside of operators.

    Collectives are run by hooks, between modules: theirs is not compared. A tied weight that is split gets memory
    twice, in equal blocks, and which of them it keeps is not compared either.
    """
    found = [
        (str(event.component), event.phase, "" if "c10d" in event.operator else event.module, event.operator)
        for event in events
        if event.kind is EventType.ALLOC and event.dtype != "uint8"
    ]
    return sorted(entry for entry in found if entry[1] == "model") + [entry for entry in found if entry[1] != "model"]


@pytest.mark.parametrize("case", [pytest.param(CASES[name], id=name, marks=MARKS.get(name, ())) for name in CASES])
def test_fake_tensors_allocate_what_cuda_does(case: tuple[str, ...], null_python: str) -> None:
    """Every allocation of two steps, in size and order; and what it is said to be for."""
    card, source, *overrides = case
    fake = memcalc.trace(source, *overrides, gpu=card, steps=2)
    null = memcalc.trace(source, *overrides, gpu=card, steps=2, device="null", python=null_python)

    assert stream(fake) == stream(null)
    assert attributed(fake.events) == attributed(null.events)
    assert len(fake.events) > 300


@pytest.mark.long
@pytest.mark.parametrize("split", [(), ("tensor_parallel=2", "sequence_parallel=true")], ids=str)
def test_shards_are_gathered_and_reduced_in_the_same_blocks(split: tuple[str, ...], null_python: str) -> None:
    """FSDP2 alone and around split layers, the tables of its copy kernels among the allocations."""
    shards = ("recipe=pure", "engine=fsdp2", "zero_stage=3", "data_parallel=2", "d=256", "h=8", *split)
    run = ("llama-3.2-1b", "num_key_value_heads=4", "head_dim=32", "intermediate_size=512", *shards, "l=2", "V=512")
    fake = memcalc.trace(*run, "s=64", gpu="h100-80gb", steps=2)
    null = memcalc.trace(*run, "s=64", gpu="h100-80gb", steps=2, device="null", python=null_python)

    assert [event.bytes for event in fake.events] == [event.bytes for event in null.events]
    assert fake.result.ledger.totals == null.result.ledger.totals
    assert [what for what, *_ in attributed(fake.events)] == [what for what, *_ in attributed(null.events)]
    again = [event.component for event in null.events if event.operator == "resize_"]
    assert set(again) == {Component.COMMUNICATION_BUFFERS}  # gathered once more into the first all-gather's storage


@pytest.mark.long
def test_the_replay_holds_what_the_real_allocator_held(null_python: str) -> None:
    """PyTorch's own counters at the end of the run against the simulator's, over the same events."""
    trace = memcalc.trace(
        "gpt2", "recipe=amp", "b=3", "s=333", "l=4", gpu="h100-80gb", steps=2, device="null", python=null_python
    )

    assert trace.replay is not None
    assert trace.recording.reserved_bytes == trace.replay.result.peak_reserved
    assert trace.recording.allocated_bytes == trace.replay.result.peak_allocated == trace.result.ledger.peak_bytes
    assert trace.result.device == "null:h100-80gb"
    assert trace.result.confidence == "allocator"


@pytest.mark.long
def test_an_out_of_memory_run_is_reported_with_pytorchs_message(null_python: str) -> None:
    """The ledger is that of a GPU which has the memory; the message is that of the one which has not."""
    overrides = ("b=8", "s=1024", "l=8", "training.attention=eager")
    trace = memcalc.trace("gpt2-xl", *overrides, gpu="t4", steps=1, device="null", python=null_python)

    assert trace.result.fits is False
    assert trace.failure is not None
    assert trace.failure.message.startswith("CUDA out of memory. Tried to allocate")
    assert "GPU 0 has a total capacity of 14.56 GiB" in trace.failure.message
    assert trace.result.ledger.peak_bytes > 14 * 2**30


@pytest.mark.long
def test_what_the_step_refuses_is_refused_from_there(null_python: str) -> None:
    """One message, from the child."""
    with pytest.raises(InputError, match="memory-efficient has no kernel for bf16"):
        memcalc.trace("gpt2", "attention=memory-efficient", "l=1", "s=64", gpu="t4", device="null", python=null_python)


SEES = {
    "llava-1.5-7b": ("recipe=pure", "b=1", "s=640", "optimizer=sgd"),
    "qwen2.5-vl-7b": ("recipe=pure", "b=2", "s=320", "optimizer=sgd"),
    "t5-base": ("recipe=pure", "b=1", "s=128"),
    "whisper-small": ("recipe=pure", "b=1", "s=128"),
}


@pytest.mark.long
@pytest.mark.parametrize("config", SEES)
def test_models_that_read_values_are_traced(config: str, null_python: str) -> None:
    """Which tokens stand for an image, and how large images are: read under the recorder, which is a mode.

    On fake tensors the same values are known: both are within 1 %.
    """
    run = (str(Path(__file__).parents[2] / "benchmarks" / "any_models" / f"{config}.json"), *SEES[config])
    fake = memcalc.trace(*run, gpu="h200", steps=2)
    null = memcalc.trace(*run, gpu="h200", steps=2, device="null", python=null_python)

    assert null.result.ledger.peak_bytes == pytest.approx(fake.result.ledger.peak_bytes, rel=0.01)
    assert null.result.device == "null:h200"
