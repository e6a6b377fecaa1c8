"""PyTorch's save_on_cpu on fake tensors: the device's and the host's memory, against formulas and recordings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError
from tests.tracing.test_offload import host_of, requested

FOLDER = Path(__file__).parents[2] / "benchmarks" / "recordings" / "activation-offload"
RECORDS = [json.loads(line) for line in (FOLDER / "null-h100-80gb-torch-2.13.0.jsonl").read_text().splitlines()]

GPT2 = "gpt2 l=3 b=2 s=128"
LLAMA = "llama-3.2-1b l=3 b=2 s=128 V=4096"
WINDOWS = "mistral-7b l=2 d=256 h=4 num_key_value_heads=2 V=4096 sliding_window=64 b=2 s=128"
MIXTURE = "mixtral-8x7b l=2 d=256 h=4 num_key_value_heads=2 moe.expert_intermediate_size=512 V=4096 b=2 s=128"
# transformers shifts the labels, two copies of 8 bytes a token with a count each that the loss holds, and positions are
# a layer's argument, which checkpoints hold: the estimate has none of these, offloaded or not.
INTEGERS = 2 * (8 * 2 * 128 + 8) + 8 * 128


def both(words: str) -> tuple[Any, Any]:
    """The traced and the estimated result."""
    run = words.split()
    return memcalc.trace(*run, gpu="h100-80gb", steps=2).result, memcalc.estimate(*run, gpu="h100-80gb")


@pytest.mark.parametrize(
    "words",
    [
        f"{GPT2} recipe=pure dropout=0.1",
        pytest.param(f"{MIXTURE} recipe=amp lora.rank=8", marks=pytest.mark.long),
        *(
            pytest.param(words, marks=pytest.mark.long)
            for words in (
                f"{GPT2} recipe=amp attention=eager dropout=0.1",
                f"{GPT2} recipe=mixed-20",
                f"{GPT2} recipe=amp recompute=full dropout=0.1",
                f"{GPT2} recipe=pure attention=memory-efficient dropout=0.1",
                f"{GPT2} recipe=fp32 dtype=fp32 attention=eager",
                f"{LLAMA} recipe=pure",
                f"{LLAMA} recipe=amp",
                f"{LLAMA} recipe=mixed-20 attention=eager",
                f"{LLAMA} recipe=amp attention=eager",
                f"{LLAMA} recipe=pure recompute=full gradient_accumulation_steps=2",
                f"{LLAMA} recipe=pure recompute=full attention=eager",
                "qwen3-0.6b l=2 b=1 s=128 V=4096 recipe=pure",
                "olmo-2-7b l=2 b=1 s=128 V=4096 recipe=pure",
                f"{LLAMA} recipe=pure lora.rank=8",
                f"{LLAMA} recipe=amp lora.rank=8",
                f"{LLAMA} recipe=pure lora.rank=8 recompute=full",
                f"{LLAMA} recipe=pure lora.rank=8 attention=eager gradient_accumulation_steps=2",
                "qwen3-0.6b l=2 b=1 s=128 V=4096 recipe=pure lora.rank=16 lora.dropout=0.05",
                f"{MIXTURE} recipe=pure",
                f"{MIXTURE} recipe=amp",
                f"{MIXTURE} recipe=mixed-20 recompute=full",
                f"{MIXTURE} recipe=pure attention=eager gradient_accumulation_steps=2",
                # 70 tokens to 8 of 32 experts: rounded up to 18 rows of each, 16 rows more than there are copies.
                "granite-3.0-1b-a400m l=2 b=1 s=70 V=4096 recipe=amp",
                "qwen1.5-moe-a2.7b l=2 b=2 s=128 V=4096 recipe=pure",  # with a shared expert, and its gate
            )
        ),
    ],
)
def test_requests_are_the_estimates(words: str) -> None:
    """To the byte, on the device and on the host, in every phase of both steps."""
    traced, estimated = both(f"{words} offload_activations=pinned")

    for phase in traced.ledger.totals:
        if phase in ("model", "optimizer"):  # what building leaves behind
            continue
        assert host_of(traced).totals[phase] == host_of(estimated).totals[phase], phase
        if phase.startswith(("forward", "loss", "backward")):
            assert requested(traced.ledger, phase) == requested(estimated.ledger, phase), phase


@pytest.mark.long
@pytest.mark.parametrize("words", ["recipe=pure zero_stage=3", "recipe=pure zero_stage=3 recompute=full"])
def test_ranks_of_fsdp2(words: str) -> None:
    """The host's bytes are the same; the device's differ by unsplit block remainders and FSDP2's own terms, 0.3 %."""
    traced, estimated = both(f"{LLAMA} engine=fsdp2 data_parallel=8 {words} offload_activations=pinned")

    for phase in ("forward_2", "loss_2", "backward_2"):
        assert host_of(traced).totals[phase] == host_of(estimated).totals[phase], phase
        assert estimated.ledger.totals[phase] == pytest.approx(traced.ledger.totals[phase], rel=0.003), phase


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        f"{GPT2} implementation=huggingface recipe=pure dropout=0.1",
        f"{GPT2} implementation=huggingface recipe=amp attention=eager",
        "llama-3.2-1b l=2 b=2 s=128 implementation=huggingface recipe=pure",
        "llama-3.2-1b l=2 b=2 s=128 implementation=huggingface recipe=amp attention=eager",
        "llama-3.2-1b l=2 b=2 s=128 implementation=huggingface recipe=mixed-20 recompute=full",
        # The host has a window's mask for each head.
        f"{WINDOWS} implementation=huggingface recipe=pure",
    ],
)
def test_requests_of_transformers_modules(words: str) -> None:
    """The same but for small tensors of integers, which the estimate lacks without offload as well."""
    traced, estimated = both(f"{words} offload_activations=pinned")

    for phase in ("forward_2", "loss_2", "backward_2"):
        assert host_of(traced).totals[phase] == host_of(estimated).totals[phase], phase
        assert 0 <= requested(traced.ledger, phase) - requested(estimated.ledger, phase) <= INTEGERS, phase


@pytest.mark.long
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["case"])
def test_the_trace_is_what_was_recorded(record: dict[str, Any]) -> None:
    """Peaks of the steady step and pinned memory, to the byte."""
    preset, *overrides = record["case"].split()
    result = memcalc.trace(preset, *overrides, gpu="h100-80gb", steps=3).result

    steady = [phase for phase in record["phases"] if phase.endswith("_3")]
    assert len(steady) == 5
    assert {phase: result.ledger.totals[phase] for phase in steady} == {p: record["phases"][p] for p in steady}
    pinned = host_of(result).peak_bytes if "=pinned" in record["case"] else 0
    assert pinned == record["pinned_bytes"]


def test_activation_offload_on_the_cpu_is_rejected() -> None:
    with pytest.raises(
        InputError, match="offload_activations = pinned has no effect on the CPU, which already holds the activations"
    ):
        memcalc.trace("gpt2", "l=1", "offload_activations=pinned", semantics="cpu")
