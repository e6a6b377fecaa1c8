"""What CUDA operators allocate inside: each expected number was read from the allocator of torch's CUDA build.

Where a test's numbers are no such readings, its docstring says that they follow from the rule.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc.api import load
from memcalc.architectures.catalogue import GradientPolicy, program
from memcalc.architectures.structure import block_structure
from memcalc.layout.symbols import symbol_values
from memcalc.ledger.component import Component
from memcalc.programs import operator_workspaces
from memcalc.spec.hardware.gpus import find_gpu

H100 = {"sms": 132, "threads": 2048, "major": 9}
A100 = {"sms": 108, "threads": 2048, "major": 8}


def block(size: int) -> int:
    """Each buffer is an allocation of its own, rounded up to 512 bytes."""
    return -(-size // 512) * 512


# -- column sums -------------------------------------------------------------------------------------------------------


def column_sum(rows: int, columns: int, card: dict[str, int]) -> int:
    return operator_workspaces.column_sum({"rows": rows, "columns": columns} | card, ("rows",), ("columns",))


@pytest.mark.parametrize(
    ("rows", "columns", "staging", "semaphores"),
    [
        # A grid of 4096 / (4·32) = 32 blocks of 32 x 4 threads; the GPU takes 132·2048/128 = 2112 such blocks. A
        # column is split over c of them: min(2112/32 = 66, 8192/4/16 = 128) = 66. Staging 4 bytes · 4096 · 66 · 32 · 4.
        (8192, 4096, 138_412_032, 128),
        # c = min(66, 4096/4/16 = 64) = 64: 4 · 4096 · 64 · 128
        (4096, 4096, 134_217_728, 128),
        # grid 8, c = min(2112/8 = 264, 16384/4/16 = 256) = 256: 4 · 1024 · 256 · 128
        (16384, 1024, 134_217_728, 32),
        # 16 columns of 4, so blocks of 16 x 8; grid 1, c = min(2112, 65536/8/16 = 512) = 512: 4 · 64 · 512 · 16 · 4
        (65536, 64, 8_388_608, 4),
    ],
)
def test_a_column_sum_is_split_over_blocks_that_meet_in_a_staging_buffer(
    rows: int, columns: int, staging: int, semaphores: int
) -> None:
    assert column_sum(rows, columns, H100) == staging + block(semaphores)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (2048, 50257),  # odd, so no vectors of 4: 50257/32 columns of blocks are more than the 528 that the GPU takes
        (255, 4096),  # a thread has few rows to add
        (4096, 4096 * 128),  # enough columns to fill the GPU
    ],
)
def test_a_column_sum_that_fills_the_gpu_needs_no_buffer(rows: int, columns: int) -> None:
    """The first is a reading; the others follow from the rule."""
    assert column_sum(rows, columns, H100) == 0


def test_a_smaller_gpu_splits_a_column_over_fewer_blocks() -> None:
    """A100: 108·2048/128 = 1728 blocks, 1728/32 = 54 a column: 4 · 4096 · 54 · 128. It follows from the rule."""
    assert column_sum(8192, 4096, A100) == 113_246_208 + block(128)


def test_tokens_are_all_axes_but_the_last() -> None:
    """A gradient of (b, s, d) is summed over b·s rows: 2·4096 = 8192."""
    values = {"b": 2, "s": 4096, "d": 4096} | H100

    assert operator_workspaces.column_sum(values, ("b", "s"), ("d",)) == column_sum(8192, 4096, H100)


@given(rows=st.integers(1, 2**18), columns=st.integers(1, 2**17), card=st.sampled_from([H100, A100]))
def test_staging_is_a_whole_number_of_columns(rows: int, columns: int, card: dict[str, int]) -> None:
    """4 bytes · columns · splits · lanes, with at least two splits, and none without semaphores."""
    size = column_sum(rows, columns, card)

    assert size == 0 or size >= block(2 * 4 * columns) + 512
    assert size % 512 == 0


# -- embedding ---------------------------------------------------------------------------------------------------------


def embedding(tokens: int, vocabulary: int, width: int) -> int:
    values = {"n": tokens, "V": vocabulary, "d": width} | A100
    sums = operator_workspaces.embedding_backward(values, ("n",), "V", "d")
    return operator_workspaces.sorted_indices(values, ("n",), "V") + sums


def test_the_embeddings_backward_sums_in_fp32() -> None:
    """8192 tokens, V = 128256, d = 4096: S = 8192/10 + 8192 = 9011 segments of 4·4096 bytes, and below 0.5 MB of
    indices: 5 lists of 8 bytes per token, one of 8 bytes a segment, two single numbers.
    """
    partial_sums = 4 * 9011 * 4096
    indices = 5 * 8 * 8192 + block(8 * 9011) + 2 * 512

    assert partial_sums == 147_636_224
    assert embedding(8192, 128_256, 4096) == partial_sums + indices == 148_037_120
    assert indices < 500_000


def test_up_to_3072_tokens_are_added_without_temporaries() -> None:
    assert embedding(3072, 50_257, 768) == 0
    lists = 5 * block(8 * 3073) + block(8 * (307 + 3073)) + 2 * 512
    assert embedding(3073, 50_257, 768) == 4 * (307 + 3073) * 768 + lists


def test_segments_are_no_more_than_rows() -> None:
    """V = 100: S = 10000/10 + 100 = 1100; two lists have a number for each row instead of each token."""
    lists = 3 * block(8 * 10_000) + 2 * block(8 * 100) + block(8 * 1100) + 2 * 512
    assert embedding(10_000, 100, 64) == 4 * 1100 * 64 + lists


# -- norms -------------------------------------------------------------------------------------------------------------


def norm(rows: int, width: int, buffers: int = 2, card: dict[str, int] = H100) -> int:
    values = {"n": rows, "d": width} | card
    return operator_workspaces.norm_backward(values, ("n",), "d", item_bytes=2, buffers=buffers)


@pytest.mark.parametrize(
    ("rows", "width", "needed"),
    [
        (65536, 1024, False),
        (65537, 1024, True),
        (65537, 2080, True),  # 2080 div 32 = 65 < 132 div 2 = 66
        (65537, 2112, False),  # 66
    ],
)
def test_a_norms_backward_needs_partial_sums_for_many_rows_and_few_columns(rows: int, width: int, needed: bool) -> None:
    assert bool(norm(rows, width)) == needed


def test_partial_sums_of_a_norm_and_the_sum_of_those() -> None:
    """65537 rows of 2080: R = min(65537/32 = 2049, 2^20/2080 = 504) rows of 2 bytes, twice, and a row with their sum;
    the sum over 504 rows is not split, since a thread has only 504/4 = 126.

    Of 1024 columns R = 1024, and each sum is split over 1024/4/16 = 16 blocks: 4 · 1024 · 16 · 128, 4·8 semaphores.
    """
    assert norm(65537, 2080) == 2 * 504 * 2080 * 2 + block(2 * 2080)
    assert norm(65537, 2080, buffers=1) == 504 * 2080 * 2 + block(2 * 2080)  # RMSNorm has no bias
    assert norm(65537, 1024) == 2 * 1024 * 1024 * 2 + 2 * 1024 + 8_388_608 + block(32)


# -- attention ---------------------------------------------------------------------------------------------------------


def flash(b: int, h: int, kv: int, s: int, d: int) -> int:
    values = {"b": b, "h": h, "h_kv": kv, "s": s, "d_h": d}
    return operator_workspaces.flash_backward(values, "h", "h_kv", "d_h", "s", item_bytes=2)


@pytest.mark.parametrize(
    ("d", "rounded"),
    [
        (64, 64),
        (80, 96),  # to 32 up to 128
        (100, 128),
        (128, 128),
        (160, 192),  # to 64 beyond
        (200, 256),
    ],
)
def test_flash_attentions_backward_accumulates_queries_in_fp32(d: int, rounded: int) -> None:
    """b = 2, h = 8, s = 1000: 1024 rows of a sum and of the gradient of q, 4 bytes each."""
    assert flash(2, 8, 8, 1000, d) == 4 * 2 * 8 * 1024 + 4 * 2 * 8 * 1024 * rounded


def test_grouped_heads_get_gradients_of_keys_and_values_for_every_query_head() -> None:
    """h_kv = 2 of h = 8: two tensors of (b, s, h, d_h) in 2 bytes beside the accumulators, rows not rounded up."""
    assert flash(2, 8, 2, 1000, 128) - flash(2, 8, 8, 1000, 128) == 2 * 2 * 2 * 1000 * 8 * 128


def efficient(b: int, h: int, s: int, d: int, item_bytes: int = 2) -> int:
    values = {"b": b, "h": h, "s": s, "d_h": d}
    return operator_workspaces.efficient_backward(values, "h", "d_h", "d_h", "s", item_bytes=item_bytes)


@pytest.mark.parametrize(
    ("s", "d", "workspace"),
    [
        (1024, 64, 16 * (16384 + 16)),  # a tile of 64 x 64 in fp32 and its lock for every 64 queries
        (1000, 64, 16 * (16384 + 16)),
        (1024, 128, 8 * (65536 + 16)),  # of 128 x 128 for every 128
        (1025, 96, 9 * (65536 + 16)),
    ],
)
def test_memory_efficient_attentions_backward_has_a_tile_for_each_block_of_queries(
    s: int, d: int, workspace: int
) -> None:
    """For each batch and head, beside 4 bytes per row."""
    assert efficient(2, 8, s, d) == block(2 * 8 * workspace) + block(2 * 8 * 4 * s)


def test_wide_heads_accumulate_keys_and_values_too() -> None:
    """b·h = 16 heads of 256, s = 1024: 2 621 952 bytes each.

    Keys are split in min(1024/64 = 16, 200/16 = 12) = 12: 2 tensors · 4 bytes · 12 · 64 · 256 = 1 572 864; queries in
    8 blocks · 4 tiles of (4·128·64 + 16) = 1 049 088.
    """
    assert 1_572_864 + 1_049_088 == 2_621_952
    assert efficient(2, 8, 1024, 256) == 16 * (2_621_952 + 4 * 1024)


@pytest.mark.parametrize(("heads", "splits"), [(1, 16), (100, 2), (101, 1), (201, 1)])
def test_the_more_heads_the_fewer_splits_of_the_keys(heads: int, splits: int) -> None:
    """At most 200 splits over all heads, at least one a head. It follows from the rule."""
    accumulators = 2 * 4 * splits * 64 * 256 + 1_049_088

    assert efficient(1, heads, 1024, 256) == heads * (accumulators + 4 * 1024)


def test_memory_efficient_attention_in_fp32() -> None:
    """d_h = 128: first the product of gradient and output, 4 b h s d_h, with its row sums twice; these are freed, then
    ceil(s/64) · (256·d_h + 16) for each head beside one copy of the sums.
    """
    product, sums = 4 * 2 * 8 * 1024 * 128, 4 * 2 * 8 * 1024
    workspace = 16 * 16 * (32768 + 16)

    assert workspace + sums < product + 2 * sums
    assert efficient(2, 8, 1024, 128, item_bytes=4) == product + 2 * sums


@pytest.mark.parametrize(("s", "rows"), [(1024, 1024), (1001, 1024), (1, 32)])
def test_memory_efficient_attention_keeps_a_number_for_rows_rounded_up_to_32(s: int, rows: int) -> None:
    assert operator_workspaces.log_sum_exp_rows({"b": 2, "h": 8, "s": s}, "h", "s") == 4 * 2 * 8 * rows


# -- in a run ----------------------------------------------------------------------------------------------------------


def test_a_named_rule_shows_its_formula() -> None:
    rule = operator_workspaces.named(operator_workspaces.log_sum_exp_rows, heads="h", length="s")

    assert rule({"b": 1, "h": 2, "s": 32}) == 4 * 2 * 32
    assert rule.__doc__ is not None
    assert rule.__doc__.startswith("4·b·h·s, rows rounded up to 32")


@pytest.mark.parametrize(
    ("overrides", "widths"),
    [
        (("architecture=gpt2",), {"qkv_proj": 12288, "o_proj": 4096, "up_proj": 16384, "down_proj": 4096}),
        # q, k and v are made head by head, by modules of their own
        (
            ("architecture=qwen2", "num_key_value_heads=8", "implementation=huggingface"),
            {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024},
        ),
    ],
)
@pytest.mark.parametrize(("gpu", "card"), [("a100-80gb", A100), ("h100-80gb", H100), (None, A100)])
def test_each_bias_of_a_layer_is_summed_over_all_tokens(
    overrides: tuple[str, ...], widths: dict[str, int], gpu: str | None, card: dict[str, int]
) -> None:
    """2·4096 rows, whether input or output is seen head by head; an A100 is taken where no GPU is given."""
    model = {"num_layers": 1, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 8}
    spec = load({"model": model | {"max_position_embeddings": 4096}}, *overrides, "b=2", "s=4096", gpu=gpu)
    done = program(
        block_structure(spec), "dense layer", recomputed=False, gradients=GradientPolicy(kept=True, main_dtype=None)
    )
    sizes = done.sizes(symbol_values(spec, find_gpu(gpu) if gpu else None))
    sums = {
        storage.name.partition(".")[2].removesuffix(" bias sum"): size
        for storage, size in zip(done.storages, sizes, strict=True)
        if storage.name.endswith("bias sum")
    }

    assert sums == {module: column_sum(8192, width, card) for module, width in widths.items()}


@pytest.mark.parametrize(
    ("gpu", "each"),
    [
        ("a100-80gb", 8_519_680),  # 2 · 4096 KiB + 8 · 16 KiB
        ("l4", 8_519_680),
        ("v100-32gb", 8_519_680),
        ("h100-80gb", 33_554_432),  # 32 MiB from compute capability 9.0 on
        ("b200", 33_554_432),
    ],
)
def test_cublas_takes_a_workspace_for_forward_and_another_for_backward(gpu: str, each: int) -> None:
    """One a thread, from its first matmul on, and for good.

    The first backward of GPT-2 peaks in the loss, before it has multiplied anything; with a vocabulary of 1,000 later.
    """
    ledger = memcalc.estimate("gpt2", gpu=gpu).ledger
    small = memcalc.estimate("gpt2", "V=1000", gpu=gpu).ledger
    held = {phase: ledger.components(phase).get(Component.LIBRARY_WORKSPACE, 0) for phase in ledger.phases}

    assert held["zero_grad_1"] == 0
    assert held["forward_1"] == held["loss_1"] == each
    assert held["backward_1"] == each
    assert small.components("backward_1")[Component.LIBRARY_WORKSPACE] == 2 * each
    assert {held[phase] for phase in ledger.phases[ledger.phases.index("optimizer_step_1") :]} == {2 * each}
