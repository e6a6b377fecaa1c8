"""Names are shown, and decide nothing: under random names every byte of a ledger and every request stays."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import memcalc
from memcalc.architectures.catalogue import compiled_part
from memcalc.programs import tape as tapes
from memcalc.programs.program import Storage
from memcalc.programs.tape import Tape
from memcalc.simulation import recorded_step, simulated_run
from memcalc.simulation.simulated_run import run_requests, unsupported_reason
from memcalc.spec.spec import Spec
from memcalc.states.parameter_copies import ParameterCopy
from tests.thinning import quick_every

RUNS = [
    ("gpt2", ("recipe=amp", "training.dropout=0.1", "attention=eager")),
    ("gpt2", ("implementation=huggingface", "recompute=[0, [1, 2], '3-5']")),
    ("gpt2", ("recipe=mixed-20", "gradient_accumulation_steps=3", "loss=chunked")),
    ("llama-3.2-1b", ("implementation=huggingface", "recompute=full", "loss=fused")),
    ("llama-3.2-1b", ("lora.rank=8", "lora.target_modules=all-linear", "recompute=every-2")),
    ("llama-3.2-1b", ("qlora.block_size=64", "recompute=full")),
    ("llama-3.2-1b", ("recipe=amp", "engine=fsdp2", "zero_stage=3", "data_parallel=8", "recompute=full")),
    ("llama-3.2-1b", ("recipe=mixed-16", "engine=deepspeed", "zero_stage=3", "data_parallel=8")),
    ("llama-3.2-1b", ("recipe=mixed-16", "engine=deepspeed", "zero_stage=2", "data_parallel=8")),
    (
        "llama-3.2-1b",
        ("tensor_parallel=2", "sequence_parallel=true", "engine=fsdp2", "zero_stage=3", "data_parallel=2"),
    ),
    ("gpt2", ("recipe=mixed-18", "data_parallel=8")),
    ("codegen-350m", ("implementation=huggingface", "attention=eager", "recompute=full")),
    ("gemma-2b", ("implementation=huggingface", "recipe=amp")),
    ("qwen2.5-0.5b", ("offload_activations=pinned", "recompute=full")),
    ("mixtral-8x7b", ("implementation=huggingface", "l=2")),
    ("gpt2", ("fp8=rowwise", "recipe=pure")),
    ("llama-3-8b", ("implementation=megatron", "tensor_parallel=2", "pipeline_parallel=2")),
    ("llama-3-8b", ("implementation=torchtitan", "recompute=selective", "data_parallel=8")),
]


def bytes_of(spec: Spec) -> tuple[Any, ...]:
    """What each component holds in each phase of each rank, and every request. Rows of one name are one row."""
    held: Counter[tuple[int, str, str]] = Counter()
    for rank, found in enumerate(memcalc.estimate(spec).ranks):
        for row in found.ledger.rows:
            for phase in row.phases:
                held[rank, row.component, phase] += row.bytes
    requests = (
        () if unsupported_reason(spec) else tuple((each.phase, *each.script) for each in run_requests(spec).stretches)
    )
    return held, requests


def names_of(spec: Spec) -> set[str]:
    """Return the names of the first rank's rows."""
    return {row.tensor for row in memcalc.estimate(spec).ranks[0].ledger.rows}


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Random names for all tensors, operators and copies that are made from now on."""
    lot = random.Random(20261123)
    make_operator, make_storage, make_copy = Tape.operator, Storage, ParameterCopy.__new__

    def any_name() -> str:
        return f"{lot.getrandbits(64):x}"

    def operator(self: Tape, *given: Any) -> Any:
        return make_operator(self, *given)._replace(name=any_name())

    monkeypatch.setattr(Tape, "operator", operator)
    monkeypatch.setattr(tapes, "Storage", lambda _, *rest: make_storage(any_name(), *rest))
    monkeypatch.setattr(
        ParameterCopy,
        "__new__",
        lambda kind, component, _, *rest, **more: make_copy(kind, component, any_name(), *rest, **more),
    )
    _forget()
    yield
    _forget()


def _forget() -> None:
    """Clear what is remembered of programs and of recorded steps."""
    for remembered in (compiled_part, recorded_step._recorded, simulated_run._recorded):
        remembered.cache_clear()


@pytest.mark.parametrize(
    ("preset", "words"), quick_every(3, RUNS, unpack=True), ids=[f"{preset} {words[0]}" for preset, words in RUNS]
)
def test_names_decide_nothing(preset: str, words: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    spec = memcalc.load(preset, *words, "b=1", "s=512", gpu="h100-80gb")
    expected, names = bytes_of(spec), names_of(spec)

    request.getfixturevalue("renamed")
    spec = spec.model_copy()  # what was computed for the same object is cached

    assert len(names - names_of(spec)) > len(names) / 4  # parameters keep theirs
    assert bytes_of(spec) == expected
