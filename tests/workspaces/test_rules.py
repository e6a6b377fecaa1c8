"""What operators take inside: worked figures of real allocations (torch 2.13, CUDA 13.0, null device), in bytes."""

from __future__ import annotations

import pytest

from memcalc.workspaces import attention, most, norms, sorting
from memcalc.workspaces.attention import Heads
from memcalc.workspaces.linear_algebra import cublas_workspace
from memcalc.workspaces.multiprocessors import Multiprocessors
from memcalc.workspaces.reductions import ReductionShape, column_sum, reduction

A100, H100 = Multiprocessors(108, 2048, 8), Multiprocessors(132, 2048, 9)


@pytest.mark.parametrize(
    ("outputs", "inputs", "contiguous", "script"),
    [
        (1, 2**24, True, (2112, 4, -4, -2112)),
        (4096, 4096, False, (134_217_728, 128, -128, -134_217_728)),
        (1024, 16384, False, (134_217_728, 32, -32, -134_217_728)),
        (50257, 2048, False, ()),
        (64, 65536, False, (8_388_608, 4, -4, -8_388_608)),
        (8, 2**20, True, (2112, 32, -32, -2112)),
        (4096, 4096, True, ()),
    ],
)
def test_reductions_of_an_h100(outputs: int, inputs: int, contiguous: bool, script: tuple[int, ...]) -> None:
    """Reductions with staging buffers that a real allocator was seen to allocate."""
    assert reduction(ReductionShape(outputs, inputs, contiguous, 1 if contiguous else outputs), H100) == script


def test_a_bias_gradient_of_an_a100() -> None:
    """1024 tokens: 768 columns take 6 MiB and 24 bytes of semaphores, 3072 columns four times as much."""
    assert column_sum(1024, 768, A100) == (6_291_456, 24, -24, -6_291_456)
    assert column_sum(1024, 3072, A100) == (25_165_824, 96, -96, -25_165_824)


@pytest.mark.parametrize(
    ("capability", "release", "config", "size"),
    [
        ((8, 0), (2, 13), "", 8_519_680),
        ((9, 0), (2, 6), "", 33_554_432),
        ((10, 0), (2, 11), "", 8_519_680),
        ((10, 0), (2, 12), "", 33_554_432),
        ((9, 0), (2, 13), ":4096:8", 33_554_432),
        ((9, 0), (2, 13), ":16:8", 131_072),
        ((9, 0), (2, 13), ":4096:2:16:8", 8_519_680),
        ((9, 0), (2, 13), ":0:0", 0),
        ((9, 0), (2, 13), "4096:2", 33_554_432),
    ],
)
def test_cublas_workspaces(capability: tuple[int, int], release: tuple[int, int], config: str, size: int) -> None:
    """By card, release and environment."""
    assert cublas_workspace(capability, release, config) == size


@pytest.mark.parametrize(
    ("count", "key_bytes", "bits", "major", "size"),
    [
        (3073, 8, 16, 8, 55_295),
        (4096, 8, 16, 8, 72_191),
        (4096, 8, 17, 8, 74_239),
        (8192, 8, 17, 8, 140_799),
        (65536, 8, 15, 8, 1_071_615),
        (65536, 8, 16, 9, 1_068_543),
        (100_000, 8, 16, 9, 1_627_135),
        (65536, 8, 16, 7, 1_077_759),
        (8192, 8, 64, 8, 151_039),
        (8192, 4, 32, 8, 110_079),
        (1000, 8, 13, 8, 1),
    ],
)
def test_cub_scratch(count: int, key_bytes: int, bits: int, major: int, size: int) -> None:
    """To the byte, by count, key and card."""
    assert sorting.sort_scratch(count, key_bytes, bits, major) == size


def test_an_embeddings_backward() -> None:
    """8192 tokens, V = 128256, d = 1024: 9011 segments of fp32; nothing for up to 3072 tokens."""
    assert sorting.before_gradient(3072, 128_256, 8) == sorting.after_gradient(3072, 128_256, 1024) == ()
    assert sorting.before_gradient(8192, 128_256, 8) == (65536, 65536, 65536, 140_799, -140_799, -65536)
    after = sorting.after_gradient(8192, 128_256, 1024)
    assert max(after) == 4 * 9011 * 1024 == 36_909_056
    assert sum(after) == -2 * 65536  # the sorted indices and their places, allocated before, are freed


def test_a_norms_backward_of_many_rows() -> None:
    """65537 rows of 768 in bf16: two buffers of 1365 partial rows, then two sums of these."""
    partial, row = 1365 * 768 * 2, 768 * 2
    script = norms.norm_backward(65537, 768, 2, 2, A100)
    assert script[:2] == (partial, partial) == (2_096_640, 2_096_640)
    assert script[2:8] == (row, 8_650_752, 24, -24, -8_650_752, -row)
    assert sum(script) == 0
    assert norms.norm_backward(65536, 768, 2, 2, A100) == ()


def test_flash_attention() -> None:
    """Row sums and the queries' gradient in fp32; keys and values of shared heads once for each query head."""
    assert attention.flash_backward(Heads(1, 12, 12, 1024, 1024, 64, 2)) == (49152, 3_145_728, -3_145_728, -49152)
    grouped = attention.flash_backward(Heads(1, 32, 8, 2048, 2048, 64, 2))
    assert grouped[:4] == (262_144, 16_777_216, 8_388_608, 8_388_608)
    inside, after = attention.flash_forward(Heads(1, 12, 12, 300, 300, 24, 2), 0.0, 108)
    assert inside == (28800, 921_600)  # two splits
    assert after == (-28800, -921_600)
    assert attention.flash_forward(Heads(1, 12, 12, 1024, 1024, 64, 2), 0.1, 108) == ((), (16, -16))


@pytest.mark.parametrize(
    ("sizes", "script"),
    [
        (Heads(1, 12, 12, 1024, 1024, 64, 2), (49152, 3_148_800, -49152, -3_148_800)),
        (Heads(1, 12, 12, 1000, 1000, 64, 2), (48000, 3_148_800, -48000, -3_148_800)),
        (Heads(1, 12, 12, 1024, 1024, 160, 2), (49152, 34_607_616, -49152, -34_607_616)),
        # 6 splits of 64 keys of 256 and 64 values of 128, and 16 blocks of queries by 3 of 64 columns
        (
            Heads(2, 16, 16, 2048, 2048, 192, 2, 128),
            (262_144, 32 * (4 * 6 * 64 * (256 + 128) + 16 * 3 * (4 * 128 * 64 + 16)), -262_144, -69_230_592),
        ),
    ],
)
def test_memory_efficient_attention(sizes: Heads, script: tuple[int, ...]) -> None:
    """Delta and accumulators, freed in the order of their allocation."""
    assert attention.efficient_backward(sizes) == script
    assert most(script) == script[0] + script[1]


def test_memory_efficient_attention_of_wide_heads_adds_its_output_up_in_fp32() -> None:
    """As wide as values: 4 bytes of 2 x 16 x 2048 x 128, and of 256 where values are as wide as keys."""
    assert attention.efficient_forward(Heads(2, 16, 16, 2048, 2048, 128, 2)) == ()
    assert attention.efficient_forward(Heads(2, 16, 16, 2048, 2048, 192, 2, 128)) == (33_554_432, -33_554_432)
    assert attention.efficient_forward(Heads(2, 16, 16, 2048, 2048, 256, 2)) == (67_108_864, -67_108_864)
    assert attention.efficient_forward(Heads(1, 8, 8, 1024, 1024, 256, 4)) == ()
