"""The largest that fits: never one too many, judged by `memcalc.estimate` alone."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc.search.boundary_search import NEIGHBORS
from memcalc.search.maxima import MAXIMA, MOST, SCALES, Maximum, heads_step
from memcalc.spec.hardware.gpus import find_gpu
from tests.properties.specs import Config, configs, examples
from tests.records import pin_records
from tests.thinning import quick_every

CARD = "t4"


def largest(what: str, source: Any, *overrides: str, gpu: str = CARD) -> Maximum:
    return memcalc.fit(source, *overrides, gpu=gpu, maximize=what).maxima[what]


def fits(source: Any, *overrides: str, gpu: str = CARD) -> bool:
    """Whether the replay gets through; of several GPUs, whether the verdict is that the run fits."""
    found = memcalc.estimate(source, *overrides, gpu=gpu).decision
    return found is not None and found.expected


@examples(4)
@given(configs())
def test_the_largest_micro_batch_fits_and_no_neighbor_above(config: Config) -> None:
    found = largest("micro_batch_size", config)

    assert fits(config, f"b={found.value}")
    assert found.result is not None
    assert (
        found.result.headline.device_bytes
        == memcalc.estimate(config, f"b={found.value}", gpu=CARD).headline.device_bytes
    )
    for more in range(1, NEIGHBORS + 1):
        assert not fits(config, f"b={found.value + more}")


@examples(4)
@given(configs(), st.sampled_from(["rope", "none"]))
def test_the_longest_sequence_fits_and_no_neighbor_above(config: Config, positions: str) -> None:
    """In steps of the tensor-parallel ranks where sequence parallelism cuts it."""
    config["model"]["position_embedding"] = positions
    config["training"]["attention"] = "flash"
    found = largest("sequence_length", config)
    t = config["parallelism"]["tensor_parallel"] if config["parallelism"]["sequence_parallel"] else 1

    assert found.step == t
    assert found.value % t == 0
    assert fits(config, f"s={found.value}")
    for more in range(1, NEIGHBORS + 1):
        assert not fits(config, f"s={found.value + more * t}")


@pytest.mark.parametrize(
    ("spread", "expected"),
    [
        (("pipeline_parallel=2", "gradient_accumulation_steps=1"), 130_520),
        pytest.param(("recipe=pure", "data_parallel=8", "zero_stage=3"), 159_840, marks=pytest.mark.long),
    ],
)
def test_masks_that_are_padded(spread: tuple[str, ...], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between multiples of 8 a layer's mask is copied to a padded one: GiB more than at the next multiple."""
    pin_records(monkeypatch)
    run = ("recompute=full", "implementation=huggingface", *spread)
    found = largest("sequence_length", "mistral-7b", *run, gpu="mi300x")

    assert found.value == expected
    assert fits("mistral-7b", *run, f"s={expected}", gpu="mi300x")
    for more in (*range(1, 17), *range(17, 200, 13)):
        assert not fits("mistral-7b", *run, f"s={expected + more}", gpu="mi300x")


@pytest.mark.long
def test_round_lengths_fit_beyond_others() -> None:
    """At 160 · 256 tokens, hidden states of 4,096 · 2 bytes per token fill 160 blocks of 2 MiB; one more token needs another.

    Lengths up to 40,960 fit and 40,961 does not; 161 · 256 = 41,216 does, and a few more after it.
    """
    run = ("recipe=pure", "recompute=full")
    found = largest("sequence_length", "llama-3-8b", *run, gpu="h200")

    assert 41_216 <= found.value < 41_472
    assert found.gaps
    for tokens in (40_960, 41_216, found.value):
        assert fits("llama-3-8b", *run, f"s={tokens}", gpu="h200")
    for tokens in (40_961, found.value + 1, *range(41_472, 43_009, 256)):
        assert not fits("llama-3-8b", *run, f"s={tokens}", gpu="h200")


@pytest.mark.parametrize("what", MAXIMA)
@pytest.mark.parametrize(
    ("name", "card"),
    quick_every(3, [("llama-3.2-1b", "rtx-4090"), ("gpt2", "t4"), ("deepseek-v2-lite", "b300")], unpack=True),
)
def test_of_presets(what: str, name: str, card: str) -> None:
    """The next one is judged by the estimate of the run that the maximum itself names."""
    overrides = ("recipe=pure", "recompute=full")
    found = largest(what, name, *overrides, gpu=card)

    assert found.result is not None
    assert found.result.decision is not None
    assert found.result.decision.expected
    assert found.is_close == (found.result.verdict == "unknown" and not found.is_at_most)
    if found.next_bytes is not None:
        assert found.next_bytes > find_gpu(card).usable_bytes
    if what in ("micro_batch_size", "sequence_length", "layers"):
        field = {"layers": "num_layers"}.get(what, what)
        assert fits(name, *overrides, f"{field}={found.value}", gpu=card)
        if found.next_bytes is not None:
            assert not fits(name, *overrides, f"{field}={found.next_value}", gpu=card)


@pytest.mark.parametrize("what", MAXIMA)
@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("llama-3-8b", "rtx-4090"),
        *(
            pytest.param(name, "b300", marks=pytest.mark.long)
            for name in ("llama-3-8b", "deepseek-v2-lite", "gpt2", "gemma-2-2b", "mixtral-8x7b", "qwen3-30b-a3b")
        ),
    ],
)
def test_words_of_the_largest(what: str, name: str, card: str) -> None:
    """Written after the run's own --set they give the run that was estimated."""
    run = ("recipe=pure", "recompute=full", "data_parallel=8", "zero_stage=3")
    found = largest(what, name, *run, gpu=card)

    assert found.result is not None
    again = memcalc.estimate(name, *run, *found.overrides, gpu=card)
    assert again.spec == found.result.spec
    assert again.headline.device_bytes == found.result.headline.device_bytes


def test_dense_layers_stay() -> None:
    """DeepSeek-V3 begins with three dense layers: two layers are another model."""
    found = largest("layers", "deepseek-v3", "recipe=mixed-16", gpu="h100-80gb")

    assert (found.value, found.next_value) == (0, 3)
    wider = largest("layers", "deepseek-v3", "recipe=pure", "recompute=full", gpu="b300")
    assert wider.value >= 3
    assert fits("deepseek-v3", "recipe=pure", "recompute=full", f"num_layers={wider.value}", gpu="b300")


def test_nothing_fits() -> None:
    """The states of 8 billion parameters alone are more than the GPU has."""
    found = largest("micro_batch_size", "llama-3-8b")

    assert (found.value, found.next_value, found.result) == (0, 1, None)
    assert found.next_verdict is not None
    assert found.next_verdict.answer == "does-not-fit"
    whole = memcalc.estimate("llama-3-8b", gpu=CARD).headline.device_bytes
    assert whole is not None
    # The lower bound: all that is allocated at once and the context, without what the allocator reserves beside it.
    assert find_gpu(CARD).usable_bytes < found.next_verdict.needed_bytes <= whole


def test_learned_positions_end_the_ladder() -> None:
    found = largest("sequence_length", "gpt2", gpu="h100-80gb")

    assert (found.value, found.next_value) == (1024, None)
    assert found.end == "the model has 1,024 learned positions"


def test_a_given_global_batch_leaves_its_divisors() -> None:
    """24 sequences over 2 replicas: 12 each, so 1, 2, 3, 4, 6 or 12 at a time; accumulation follows."""
    overrides = ("global_batch_size=24", "data_parallel=2", "recipe=amp")
    found = largest("micro_batch_size", "gpt2", *overrides, gpu="rtx-3090")

    assert found.value in (1, 2, 3, 4, 6, 12)
    assert found.result is not None
    assert found.result.spec.training.gradient_accumulation_steps == 12 // found.value
    assert found.next_value is None or not fits("gpt2", *overrides, f"b={found.next_value}", gpu="rtx-3090")


def test_pieces_of_a_sequence_over_contexts_and_tensors() -> None:
    """Two pieces for each of 4 context ranks, each cut over 2 tensor ranks: 2 x 4 x 2 = 16 tokens a step."""
    spread = ("context_parallel=4", "tensor_parallel=2", "sequence_parallel=true")
    found = largest("sequence_length", "llama-3.2-1b", "l=4", *spread, gpu="h100-80gb")

    assert found.step == 16
    assert found.value % 16 == 0


def test_a_scaled_model_keeps_its_shape() -> None:
    """Llama-3-8B at 40 of its 32 heads: d = 4096 · 40/32 = 5120, F = 14336 · 40/32 = 17920, l = 32 · 40/32 = 40."""
    model = memcalc.load("llama-3-8b").model
    assert heads_step(model, 1) == 4  # groups of 32/8 query heads
    assert heads_step(model, 8) == 8  # 8 ranks take 8 groups, or two ranks share one

    found = largest("parameters", "llama-3-8b", "recipe=pure", "recompute=full", gpu="h200")
    assert found.result is not None
    grown = found.result.spec.model
    assert grown.num_attention_heads == found.value
    assert grown.num_key_value_heads * 4 == found.value
    assert grown.head_dim == model.head_dim
    assert grown.hidden_size == model.hidden_size * found.value // 32
    assert grown.num_layers == found.value
    assert found.parameters == found.result.parameters


def test_every_ladder_has_a_length_where_sizes_have_32_bits() -> None:
    """As in a browser, where the largest is 2^31 - 1."""
    assert MOST == 2**31 - 1
    for scale in SCALES.values():
        assert len(scale(memcalc.load("gpt2", gpu="t4")).ladder) <= 2**31 - 1
