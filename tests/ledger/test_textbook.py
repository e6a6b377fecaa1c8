"""The closed forms give the figures that the papers print."""

from __future__ import annotations

from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from fractions import Fraction
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc.layout.parameters import count_parameters
from memcalc.ledger.component import Component
from memcalc.ledger.result import Textbook
from memcalc.ledger.textbook import (
    activation_bytes,
    deepspeed_gpu_bytes,
    deepspeed_host_bytes,
    kv_cache_bytes,
    latent_cache_bytes,
    model_state_bytes,
    parameters,
    tensor_parallel_layer_bytes,
    zero_model_state_bytes,
)

GPT3 = {"l": 96, "d": 12288}  # Brown et al. (arXiv 2005.14165) table 2.1
GPT3_PARAMETERS = 174_579_068_928
GIB = 2**30


def published(*words: str) -> Textbook:
    """The closed forms that an estimate shows."""
    found = memcalc.estimate(*words).textbook
    assert found is not None
    return found


# -- GPT-3 -------------------------------------------------------------------------------------------------------------


def test_gpt3_has_175_billion_parameters() -> None:
    """96 (12·12288² + 13·12288) + 50257·12288 = 96 · 1 812 099 072 + 617 558 016."""
    assert parameters(**GPT3, V=50257) == GPT3_PARAMETERS
    assert published("gpt3").parameters == GPT3_PARAMETERS


def test_gpt3_counted_exactly_has_learned_positions_and_a_final_norm_more() -> None:
    """The closed form + 2048·12288 positions + a norm of 2·12288 = 174 579 068 928 + 25 165 824 + 24 576."""
    result = memcalc.estimate("gpt3")

    assert result.parameters == count_parameters(result.spec.model) == 174_604_259_328
    assert result.parameters - published("gpt3").parameters == 2048 * 12288 + 2 * 12288


@pytest.mark.parametrize(
    ("recipe", "per_parameter", "expected"),
    [
        ("mixed-20", 20, 3_491_581_378_560),  # 20 · 174 579 068 928: MT-NLG
        ("mixed-18", 18, 3_142_423_240_704),  # 18 · 174 579 068 928: Megatron-LM
        ("mixed-16", 16, 2_793_265_102_848),  # 16 · 174 579 068 928: ZeRO
        ("pure", 8, 1_396_632_551_424),  # 8 · 174 579 068 928
    ],
)
def test_gpt3_model_states(recipe: str, per_parameter: int, expected: int) -> None:
    textbook = published("gpt3", f"recipe={recipe}")

    assert model_state_bytes(GPT3_PARAMETERS, per_parameter) == expected
    assert (textbook.bytes_per_parameter, textbook.model_state_bytes) == (per_parameter, expected)


@pytest.mark.parametrize(
    ("b", "expected", "ratio"),
    [
        # One layer and sequence: 34·2048·12288 + 5·2048²·96 = 855 638 016 + 2 013 265 920 = 2 868 903 936; times 96 b.
        (1, 275_414_777_856, "0.79"),
        (64, 17_626_545_782_784, "50"),
        (128, 35_253_091_565_568, "101"),
    ],
)
def test_gpt3_activations_and_their_ratio_to_16_bit_parameters(b: int, expected: int, ratio: str) -> None:
    """The ratio is activations / (2 bytes · 174 579 068 928): 0.789, 50.48, 100.97."""
    assert activation_bytes(**GPT3, h=96, b=b, s=2048) == 96 * b * 2_868_903_936 == expected
    assert published("gpt3", f"b={b}").activation_bytes == expected

    exact = Decimal(expected) / Decimal(2 * GPT3_PARAMETERS)
    assert exact.quantize(Decimal(ratio), ROUND_HALF_UP) == Decimal(ratio)


def test_sharding_does_not_change_the_textbook() -> None:
    """The published forms are of one GPU that holds everything."""
    sharded = memcalc.estimate("gpt3", "tensor_parallel=8", "pipeline_parallel=8", "data_parallel=4", "zero_stage=1")

    assert sharded.textbook == memcalc.estimate("gpt3").textbook


# -- other models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("l", "d", "expected"),
    [
        (32, 4096, 6_442_450_944),
        (40, 5120, 12_582_912_000),
        (60, 6656, 31_897_681_920),
        (80, 8192, 64_424_509_440),
    ],
)
def test_the_quick_form_12_l_d2_is_what_the_matrices_alone_hold(l: int, d: int, expected: int) -> None:  # noqa: E741
    """Without a vocabulary, biases and norms (13 d a layer) are all that the form has more."""
    assert parameters(l, d, V=0) - l * 13 * d == 12 * l * d**2 == expected


def test_mt_nlg_needs_10_6_terabytes_of_states() -> None:
    """MT-NLG (arXiv 2201.11990) section 3.1: 20 bytes · 530e9 parameters."""
    assert model_state_bytes(530 * 10**9, 20) == 10_600_000_000_000


def test_mt_nlg_needs_16_9_terabytes_of_checkpointed_activations() -> None:
    """MT-NLG section 3.1: 2 bytes · 1920 sequences · 2048 tokens · 20480 · 105 layers, as the ledger holds them."""
    mt_nlg = {
        "model": {
            "num_layers": 105,
            "hidden_size": 20480,
            "num_attention_heads": 128,
            "vocab_size": 51200,
            "max_position_embeddings": 2048,
        },
        "training": {"b": 1920, "attention": "eager", "dropout": 0.1, "recompute": "full"},
    }

    held = memcalc.estimate(mt_nlg).ledger.components("loss_1")[Component.ACTIVATIONS]

    assert held == 2 * 1920 * 2048 * 20480 * 105 == 16_911_433_728_000


# -- ZeRO --------------------------------------------------------------------------------------------------------------

ZERO_TABLE_1 = {
    # N: GB a device at stage 1, 2, 3 of models of 7.5B, 128B and 1T parameters
    4: ("52.5 41.3 30", "896 704 512", "7000 5500 4000"),
    16: ("35.6 21.6 7.5", "608 368 128", "4750 2875 1000"),
    64: ("31.4 16.6 1.88", "536 284 32", "4187 2218 250"),
    256: ("30.4 15.4 0.47", "518 263 8", "4046 2054 62.5"),
    1024: ("30.1 15.1 0.12", "513 257 2", "4011 2013 15.6"),
}
ZERO_MODELS = (7_500_000_000, 128_000_000_000, 1_000_000_000_000)


@pytest.mark.parametrize(
    ("P", "N", "stage", "printed"),
    [
        (P, N, stage, printed)
        for N, columns in ZERO_TABLE_1.items()
        for P, column in zip(ZERO_MODELS, columns, strict=True)
        for stage, printed in enumerate(column.split(), 1)
    ],
)
def test_zero_table_1(P: int, N: int, stage: int, printed: str) -> None:  # noqa: N803 -- the paper's symbols
    """ZeRO (arXiv 1910.02054) table 1 prints each figure rounded (7.5B: 21.5625 as 21.6) or cut (1T: 4187.5 as 4187).

    Stage 1: 4 P + 12 P/N; stage 2: 2 P + 14 P/N; stage 3: 16 P/N.
    """
    exact = zero_model_state_bytes(P, N, stage)
    closed = {1: 4 * P + 12 * P // N, 2: 2 * P + 14 * P // N, 3: 16 * P // N}[stage]
    gigabytes = Decimal(exact) / 10**9

    assert abs(exact - closed) <= 1  # each class of states is a whole number of bytes
    assert Decimal(printed) in {gigabytes.quantize(Decimal(printed), how) for how in (ROUND_HALF_UP, ROUND_DOWN)}


@pytest.mark.parametrize(("P", "gigabytes"), list(zip(ZERO_MODELS, (120, 2048, 16000), strict=True)))
def test_without_zero_every_device_holds_16_bytes_a_parameter(P: int, gigabytes: int) -> None:  # noqa: N803
    """2 + 2 + 12 bytes: 7.5B needs 120 GB, 128B 2048 GB, 1T 16000 GB, however many devices there are."""
    for devices in (1, 4, 1024):
        assert zero_model_state_bytes(P, devices, 0) == gigabytes * 10**9


@given(P=st.integers(1, 10**13), N=st.integers(1, 4096), stage=st.integers(1, 3))
def test_each_stage_of_zero_needs_no_more_than_the_one_before(P: int, N: int, stage: int) -> None:  # noqa: N803
    assert zero_model_state_bytes(P, N, stage) <= zero_model_state_bytes(P, N, stage - 1)
    assert zero_model_state_bytes(P, 1, stage) == 16 * P


@given(shard=st.integers(1, 10**10), N=st.integers(1, 4096))
def test_the_shards_of_stage_3_add_up_to_the_whole(shard: int, N: int) -> None:  # noqa: N803 -- the paper's symbol
    assert N * zero_model_state_bytes(shard * N, N, 3) == zero_model_state_bytes(shard * N, N, 0)


# -- Korthikanti et al. ------------------------------------------------------------------------------------------------


class Configuration(NamedTuple):
    """A row of Korthikanti et al. (arXiv 2205.05198) table 3; sequences are 2048 tokens."""

    l: int  # noqa: E741 -- the paper's symbol
    d: int
    h: int
    t: int
    p: int
    v: int | None  # layers a stage holds in v chunks (interleaved schedule); None: one chunk
    b: int

    def layer(self, *, sequence: bool, selective: bool) -> int:
        """Activations of one layer."""
        return tensor_parallel_layer_bytes(self.d, self.h, self.b, 2048, self.t, sequence=sequence, selective=selective)

    @property
    def layers_in_flight(self) -> Fraction:
        """Stage 0 holds l/p layers of p micro-batches; interleaving adds (p-1)/(p v) of that (section 4.2.3)."""
        return self.l * (Fraction(1) if self.v is None else 1 + Fraction(self.p - 1, self.p * self.v))


KORTHIKANTI = {
    "22B": Configuration(48, 6144, 64, t=8, p=1, v=None, b=4),
    "175B": Configuration(96, 12288, 96, t=8, p=8, v=3, b=1),
    "530B": Configuration(105, 20480, 128, t=8, p=35, v=3, b=1),
    "1T": Configuration(128, 25600, 160, t=8, p=64, v=None, b=1),
}

# GiB per GPU: 18 bytes of states on 12 l d² / (t p) parameters; activations of tensor parallelism alone; those of
# tensor and sequence parallelism with selective recomputation.
FIGURE_1 = {
    "22B": ("45.5625", "59.25", "9.5625"),
    "175B": ("45.5625", "66.84375", "12.3515625"),
    "530B": ("31.640625", "114.0234375", "23.076171875"),
    "1T": ("32.958984375", "131.25", "26.5625"),
}


@pytest.mark.parametrize("name", FIGURE_1)
def test_korthikanti_figure_1(name: str) -> None:
    """175B: 2048·12288 · (10 + 24/8 + 5·96·2048/(12288·8)) = 25165824 · 23 bytes per layer, 96 · (1 + 7/24) layers."""
    model = KORTHIKANTI[name]
    states, none, both = map(Fraction, FIGURE_1[name])
    split = 12 * model.l * model.d**2 // (model.t * model.p)

    assert model_state_bytes(split, 18) == states * GIB
    assert model.layer(sequence=False, selective=False) * model.layers_in_flight == none * GIB
    assert model.layer(sequence=True, selective=True) * model.layers_in_flight == both * GIB


# Per cent of what tensor parallelism alone holds: sequence parallelism, selective recomputation, both, full
# recomputation (which keeps 2·s·b·d, its input). First as the formulas have it, then as read off the chart.
FIGURE_7 = {
    "22B": ("66.77 49.37 16.14 7.59", "66.84 49.42 16.18 7.64"),
    "175B": ("61.96 56.52 18.48 8.70", "62.04 56.53 18.49 8.71"),
    "530B": ("58.33 61.90 20.24 9.52", "58.31 62.04 20.27 9.42"),
    "1T": ("58.33 61.90 20.24 9.52", "58.31 62.04 20.27 9.42"),
}
CHART_READING = Decimal("0.2")  # how well a bar's height can be read off the printed figure, in per cent


@pytest.mark.parametrize("name", FIGURE_7)
def test_korthikanti_figure_7(name: str) -> None:
    """22B: of 10 + 24/8 + 5·64·2048/(6144·8) = 26.33 sbd, sequence parallelism keeps 34/8 + 13.33 = 17.58."""
    model = KORTHIKANTI[name]
    none = model.layer(sequence=False, selective=False)
    kept = (
        model.layer(sequence=True, selective=False),
        model.layer(sequence=False, selective=True),
        model.layer(sequence=True, selective=True),
        2 * 2048 * model.b * model.d,
    )
    exact = [100 * Decimal(each) / Decimal(none) for each in kept]
    formula, chart = ([Decimal(figure) for figure in row.split()] for row in FIGURE_7[name])

    assert [share.quantize(Decimal("0.01"), ROUND_HALF_UP) for share in exact] == formula
    assert all(abs(share - read) <= CHART_READING for share, read in zip(exact, chart, strict=True))


def test_table_2_of_one_rank_is_equation_1() -> None:
    """t = 1: 10 + 24/1 = 34; with or without sequence parallelism nothing is split."""
    whole = activation_bytes(1, 12288, 96, 1, 2048)

    assert whole == 2_868_903_936
    for sequence in (False, True):
        assert tensor_parallel_layer_bytes(12288, 96, 1, 2048, 1, sequence=sequence, selective=False) == whole


@given(d=st.integers(1, 64), h=st.integers(1, 16), b=st.integers(1, 8), s=st.integers(1, 64), t=st.integers(1, 16))
def test_ranks_with_sequence_parallelism_hold_the_whole_layer_together(d: int, h: int, b: int, s: int, t: int) -> None:
    """s·b·d/t · (34 + 5hs/d), t times; sizes are multiples of t so that they divide."""
    share = tensor_parallel_layer_bytes(d * t, h * t, b, s * t, t, sequence=True, selective=False)

    assert t * share == activation_bytes(1, d * t, h * t, b, s * t)


@pytest.mark.parametrize(
    ("stage", "offload", "gpu_gib", "host_gib"),
    [
        (2, "none", 15.93, 127.45),  # 4 P + 16 P / 8 = 6 P; host: 4 * 8 * 1.5 P
        (2, "optimizer", 5.31, 127.45),  # 2 P; host: max(4 * 8, 16) * 1.5 P
        (3, "none", 6.09, 1.43),  # 4 * 32e6 + 18 P / 8; host: 32e6 * 4 * 8 * 1.5
        (3, "optimizer", 0.78, 63.72),  # 4 * 32e6 + 2 P / 8; host: 16 * 1.5 P
        (3, "all", 0.12, 71.69),  # 4 * 32e6; host: 18 * 1.5 P
    ],
)
def test_deepspeeds_own_estimates(stage: int, offload: str, gpu_gib: float, host_gib: float) -> None:
    """T5-3B on one node of 8 GPUs: P = 2851e6, its largest layer 32e6, in GiB as DeepSpeed's documentation prints."""
    on_gpu = deepspeed_gpu_bytes(2_851_000_000, 8, stage, largest_layer=32_000_000, offload=offload)
    on_host = deepspeed_host_bytes(2_851_000_000, 8, stage, largest_layer=32_000_000, offload=offload)

    assert round(on_gpu / 2**30, 2) == gpu_gib
    assert round(on_host / 2**30, 2) == host_gib


@pytest.mark.parametrize(("offload", "mib"), [("none", 3291), ("all", 125), ("optimizer", 477)])
def test_deepspeeds_own_estimates_of_t5_large(offload: str, mib: int) -> None:
    """T5-large, ZeRO-3 on 4 GPUs: 737.67e6 parameters, 32.90e6 in the largest layer; cut to whole MiB."""
    found = deepspeed_gpu_bytes(737_670_000, 4, 3, largest_layer=32_900_000, offload=offload)

    assert found // 2**20 == mib


@pytest.mark.parametrize(
    ("preset", "bytes_"), [("llama-3-8b", 131_072), ("llama-3-70b", 327_680), ("deepseek-v3", 70_272)]
)
def test_cache_bytes_of_a_token(preset: str, bytes_: int) -> None:
    """LLaMA-3-8B: 2 · 32 layers · 8 heads · 128 · 2 bytes; DeepSeek-V3: 61 · (512 + 64) · 2."""
    model = memcalc.load(preset).model
    if model.mla is None:
        found = kv_cache_bytes(model.num_layers, model.num_key_value_heads, model.head_dim, 1)
    else:
        found = latent_cache_bytes(model.num_layers, model.mla.kv_lora_rank, model.mla.qk_rope_head_dim, 1)

    assert found == bytes_


def test_cache_bytes_with_a_key_and_a_value_of_every_head() -> None:
    """LLaMA-2-70B if it had as many of them as query heads: 2 · 80 · 64 · 128 · 2."""
    assert kv_cache_bytes(80, 64, 128, 1) == 2_621_440
