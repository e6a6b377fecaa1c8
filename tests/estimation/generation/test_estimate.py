"""Generation by formula: what is held when, on how many GPUs, and the most that a GPU holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc.estimation.generation import allocated_bytes
from memcalc.estimation.max_batch import with_sizes
from memcalc.layout.stages import stages_of
from memcalc.ledger.component import Component
from memcalc.ledger.result import Result
from memcalc.spec.hardware.gpus import find_gpu
from tests.properties.specs import examples

MIB = 2**20


def asked(preset: str, *words: str, gpu: str | None = None) -> Result:
    """The estimate, words of the inference block without its name."""
    others = ("model.", "tensor_parallel", "pipeline_parallel", "expert_parallel", "data_parallel")
    return memcalc.estimate(preset, *(w if w.startswith(others) else f"inference.{w}" for w in words), gpu=gpu)


def cache(result: Result, phase: str) -> int:
    return result.ledger.components(phase).get(Component.KV_CACHE, 0)


def test_the_moments_of_a_generation() -> None:
    """Llama-3-8B, 4 prompts of 1000 tokens, 24 new ones: 131,072 bytes per token and sequence."""
    result = asked("llama-3-8b", "batch_size=4", "prompt_length=1000", "new_tokens=24")

    assert result.ledger.phases == ("model", "input", "prefill", "decode_1", "decode_last")
    assert result.ledger.components("model")[Component.WEIGHTS] >= 8_030_261_248 * 2
    assert cache(result, "model") == cache(result, "input") == 0
    assert cache(result, "prefill") == 4 * 1000 * 131_072
    # While a token is added, the keys and values of one of 32 layers exist in their old size beside the new one.
    one_layer = 4 * 2 * 8 * 128 * 2
    assert cache(result, "decode_last") in (4 * 1024 * 131_072, 4 * 1024 * 131_072 + 1023 * one_layer // 2)


def test_components_sum_to_the_phases() -> None:
    for words in (["cache=dynamic"], ["cache=static"], ["cache=paged", "prefill_chunk=256"], ["quantization=nf4"]):
        ledger = asked("qwen3-4b", "batch_size=3", *words).ledger
        for phase in ledger.phases:
            assert sum(ledger.components(phase).values()) == ledger.totals[phase]
            assert sum(row.bytes for row in ledger.live_rows(phase)) == ledger.totals[phase]


def test_no_new_token_no_decoding() -> None:
    assert asked("gpt2", "new_tokens=0").ledger.phases == ("model", "input", "prefill")


def test_blocks_of_a_paged_cache_are_whole() -> None:
    """2001 tokens are 126 blocks of 16, and there before the first forward."""
    result = asked("llama-3-8b", "cache=paged", "batch_size=2", "prompt_length=2000", "new_tokens=1")

    assert cache(result, "input") == cache(result, "decode_1") == 2 * 126 * 16 * 131_072
    half = asked(
        "llama-3-8b", "cache=paged", "batch_size=2", "prompt_length=2000", "new_tokens=1", "kv_cache_dtype=fp8"
    )
    assert cache(half, "input") == 126 * 16 * 131_072


def test_a_window_keeps_what_it_shows() -> None:
    """Gemma-3-1B: 26 layers, each 6th attends to all, the others to 512 tokens; a head of 256 for keys and values."""
    tokens, width = 6144 + 16, 2 * 256 * 2
    found = asked("gemma-3-1b", "prompt_length=6144", "new_tokens=16").generation
    assert found is not None
    assert found.bytes_per_sequence == (4 * tokens + 22 * 512) * width

    static = asked("gemma-3-1b", "prompt_length=6144", "new_tokens=16", "cache=static")
    assert cache(static, "decode_last") == (4 * tokens + 22 * 512) * width

    # vLLM's SlidingWindowSpec: what the next forward shows, 511 tokens and its own 256, in blocks, and a block more.
    paged = asked("gemma-3-1b", "prompt_length=6144", "new_tokens=16", "cache=paged", "prefill_chunk=256")
    assert cache(paged, "input") == (4 * tokens + 22 * (48 + 1) * 16) * width


def test_a_static_cache_has_its_size_from_the_first_forward_on() -> None:
    result = asked("llama-3-8b", "cache=static", "prompt_length=500", "new_tokens=524")

    assert cache(result, "prefill") == cache(result, "decode_1") == cache(result, "decode_last") == 1024 * 131_072


def test_ranks_share_heads_and_layers() -> None:
    """8 heads over 4 ranks, and copies over 16; half of the layers each. The latent of DeepSeek is whole on every rank."""
    paged = ["cache=paged", "prompt_length=1023", "new_tokens=1"]
    whole = cache(asked("llama-3-8b", *paged), "input")

    assert cache(asked("llama-3-8b", *paged, "tensor_parallel=4"), "input") == whole // 4
    assert cache(asked("llama-3-8b", *paged, "tensor_parallel=16"), "input") == whole // 8
    assert cache(asked("llama-3-8b", *paged, "pipeline_parallel=2"), "input") == whole // 2
    latent = cache(asked("deepseek-v3", *paged), "input")
    assert cache(asked("deepseek-v3", *paged, "tensor_parallel=8"), "input") == latent == 1024 * 70_272


def test_weights_are_shared_by_ranks() -> None:
    weights = [
        asked("mixtral-8x7b", "cache=paged", *words).ledger.components("model")[Component.WEIGHTS]
        for words in ([], ["tensor_parallel=2"], ["expert_parallel=8", "data_parallel=8"])
    ]

    assert weights[0] == 46_702_792_704 * 2
    assert weights[1] == pytest.approx(weights[0] / 2, rel=0.001)
    # 32 layers of 8 experts of 3 matrices [14336, 4096]: 7 of 8 are elsewhere
    assert weights[0] - weights[2] == 32 * 7 * 3 * 14336 * 4096 * 2


def test_weights_in_4_bits() -> None:
    """Of Llama-3-8B 32 layers' matrices: half a byte and a scale of 4 bytes for each 64; table and head stay 2 bytes."""
    result = asked("llama-3-8b", "quantization=nf4")
    matrices = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    rest = 8_030_261_248 - matrices
    tables = 32 * 7 * 16 * 4  # fp32 values that 4 bits stand for, of each matrix

    weights = sum(row.bytes for row in result.ledger.rows if row.component == "weights" and row.module != "buffers")
    assert weights == matrices // 2 + 4 * matrices // 64 + tables + 2 * rest
    assert result.parameters == 8_030_261_248


def test_a_prompt_in_pieces_needs_less() -> None:
    peaks = [
        asked("llama-3-8b", "cache=paged", "batch_size=8", "prompt_length=4000", f"prefill_chunk={chunk}").ledger
        for chunk in (250, 1000, 4000)
    ]

    assert [ledger.totals["prefill"] for ledger in peaks] == sorted(ledger.totals["prefill"] for ledger in peaks)
    assert peaks[0].totals["prefill"] < peaks[2].totals["prefill"] - 3 * 2**30


LARGEST = [
    ("llama-3-8b", "h100-80gb", ["context_length=8192", "new_tokens=16"]),
]
MORE = [
    ("gemma-3-1b", "l4", ["batch_size=4"]),
    ("llama-3-70b", "a100-80gb", ["cache=paged", "tensor_parallel=4", "prefill_chunk=2048"]),
    ("gpt2", "t4", ["cache=static", "dtype=fp16"]),
    ("llama-3-8b", "rtx-4090", ["quantization=nf4"]),
]


@pytest.mark.parametrize(
    ("preset", "gpu", "words"), [*LARGEST, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)]
)
def test_the_largest_batch_fits_and_one_more_does_not(preset: str, gpu: str, words: list[str]) -> None:
    result = asked(preset, *words, gpu=gpu)
    assert result.generation is not None
    most = result.generation.largest
    assert most is not None

    for size, fits in ((most.batch_size, True), (most.batch_size + 1, False)):
        found = asked(preset, *(w for w in words if "batch" not in w), f"batch_size={size}", gpu=gpu)
        assert (found.verdict == "fits") is fits


@pytest.mark.parametrize("preset", ["llama-3-8b", pytest.param("command-r7b", marks=pytest.mark.long)])
def test_the_longest_context_fits_and_one_more_token_does_not(preset: str) -> None:
    result = asked(preset, "batch_size=40", "new_tokens=10", gpu="a100-40gb")
    assert result.generation is not None
    most = result.generation.largest
    assert most is not None
    assert not most.all_positions

    for context, fits in ((most.context_length, True), (most.context_length + 1, False)):
        found = asked(preset, "batch_size=40", f"prompt_length={context - 10}", "new_tokens=10", gpu="a100-40gb")
        assert found.fits is fits


def test_a_run_beyond_the_models_positions_is_asked_what_memory_allows() -> None:
    """Rotary positions can be stretched: 9,000 tokens of 8,192 are estimated, and the longest context is no shorter."""
    beyond = asked(
        "llama-3-8b", "model.num_layers=2", "context_length=9000", "new_tokens=16", gpu="a100-80gb"
    ).generation
    within = asked(
        "llama-3-8b", "model.num_layers=2", "context_length=8000", "new_tokens=16", gpu="a100-80gb"
    ).generation

    assert beyond is not None and beyond.largest is not None  # noqa: PT018 -- for the type checker
    assert within is not None and within.largest is not None  # noqa: PT018 -- for the type checker
    assert (within.largest.context_length, within.largest.all_positions) == (8192, True)
    assert beyond.largest.context_length > 9000
    assert not beyond.largest.all_positions


def test_weights_alone_may_be_too_large() -> None:
    result = asked("llama-3-70b", "batch_size=1", "new_tokens=16", gpu="a100-80gb")

    assert result.fits is False
    assert result.generation is not None
    assert result.generation.largest is not None
    assert (result.generation.largest.batch_size, result.generation.largest.context_length) == (0, 0)


def test_the_quick_sum_is_the_ledgers() -> None:
    card = find_gpu("h100-80gb")
    for preset, words in (("llama-3-8b", ["batch_size=3"]), ("deepseek-v2-lite", ["cache=paged", "tensor_parallel=2"])):
        result = asked(preset, *words, gpu="h100-80gb")
        assert allocated_bytes(result.spec, stages_of(result.spec)[0], card) == result.ledger.peak_bytes


SIZES: dict[str, Any] = {
    "l": st.integers(1, 5),
    "d": st.sampled_from([64, 128]),
    "h": st.sampled_from([4, 8]),
    "V": st.integers(50, 200),
    "num_key_value_heads": st.sampled_from([1, 2, 4]),
    "sliding_window": st.sampled_from([0, 8, 64]),
    "full_attention_interval": st.integers(0, 3),
    "position_embedding": st.just("rope"),
    "parallel_block": st.booleans(),
    "mlp": st.sampled_from(["gelu", "swiglu"]),
}
BLOCKS: dict[str, Any] = {
    "batch_size": st.integers(1, 5),
    "prompt_length": st.integers(1, 70),
    "new_tokens": st.integers(0, 9),
    "cache": st.sampled_from(["dynamic", "static", "paged"]),
}


@pytest.mark.long
@given(st.fixed_dictionaries(SIZES), st.fixed_dictionaries(BLOCKS))
@examples(60)
def test_sums_hold_and_more_sequences_need_more(model: dict[str, Any], block: dict[str, Any]) -> None:
    result = memcalc.estimate({"model": model, "inference": block})
    ledger, spec = result.ledger, result.spec

    for phase in ledger.phases:
        assert sum(ledger.components(phase).values()) == ledger.totals[phase]
    more = memcalc.estimate(with_sizes(spec, batch_size=block["batch_size"] + 1)).ledger
    assert more.peak_bytes >= ledger.peak_bytes
    assert result.generation is not None
    tokens, window = block["prompt_length"] + block["new_tokens"], spec.model.sliding_window
    if block["cache"] != "paged":
        kept = [min(tokens, window) if spec.model.has_window(i) else tokens for i in range(spec.model.num_layers)]
        each = 2 * spec.model.num_key_value_heads * spec.model.head_dim * 2  # a key and a value of 2 bytes per element
        assert result.generation.bytes_per_sequence == each * sum(kept)
        most = max(cache(result, phase) for phase in ledger.phases)
        assert most <= each * sum(max(k, block["prompt_length"]) + tokens for k in kept) * block["batch_size"]
