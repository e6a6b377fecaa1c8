"""Rounding and unsplit rests, against the allocator of torch's CUDA build (worked examples of `should_split`)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc.allocator.pytorch import block_sizes
from memcalc.allocator.pytorch.block_sizes import AllocationSequence, rounded
from memcalc.ledger.component import Component

MIB = 2**20


def in_turn(*lists: list[int]) -> list[int]:
    """Of lists of tensors, one after the other on an empty device."""
    return block_sizes.unsplit_remainders(*([AllocationSequence(tuple(sizes))] for sizes in lists))


def unsplit_tails(sizes: list[int]) -> int:
    """Of one list of tensors on an empty device."""
    (tails,) = in_turn(sizes)
    return tails


@pytest.mark.parametrize(
    ("size", "block"), [(0, 0), (1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_requests_are_rounded_up_to_512_bytes(size: int, block: int) -> None:
    assert rounded(size) == block


def test_small_tensors_share_segments_in_which_every_rest_is_split_off() -> None:
    """1, 513 and 2^20 bytes: 512 + 1024 + 1 048 576 = 1 050 112 allocated, all of it rounding."""
    sizes = [1, 513, MIB]

    assert sum(map(rounded, sizes)) == 1_050_112
    assert unsplit_tails(sizes) == 0


def test_middling_tensors_share_segments_of_20_mib() -> None:
    """1 048 577 bytes begin one: 20 971 520 - 1 049 088 = 19 922 432 are left. 10 485 759 are rounded to 10 MiB, and
    leave 9 436 672, too few for another 10 485 760, which get a segment of 10 MiB to the byte; 12 582 913 one of
    14 MiB, of which 2 MiB less 512 are split off. No rest stays; 35 654 144 bytes are allocated.
    """
    sizes = [1, 513, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 12 * MIB + 1]

    assert unsplit_tails(sizes) == 0
    assert sum(map(rounded, sizes)) == 35_654_144


@pytest.mark.parametrize(
    ("request_", "tail"),
    [
        (19 * MIB, MIB),  # a 20 MiB block is not split: a remainder of 1 MiB is not more than 1 MiB
        (19 * MIB - 512, 0),  # a rest of 1 MiB and 512 bytes is split off
    ],
)
def test_a_rest_of_1_mib_stays_with_its_tensor(request_: int, tail: int) -> None:
    """19 MiB of a fresh segment, which is 20 MiB: 20 971 520 allocated; and 19 922 432 for 512 bytes less."""
    assert unsplit_tails([request_]) == tail
    assert rounded(request_) + tail == {MIB: 20_971_520, 0: 19_922_432}[tail]


def test_a_segment_made_to_measure_is_a_multiple_of_2_mib() -> None:
    """11.5 MiB on a fresh device: 12 MiB allocated, 12 058 624 bytes requested."""
    assert 12_058_624 + unsplit_tails([12_058_624]) == 12_582_912


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    """In MiB: 2 of 20 leave 18, 9 of those leave 9; 9.5 do not fit and leave 10.5 of a new 20.

    Then 8.5 fit both 9 and 10.5. They get the 9, and the 0.5 that is left stays; of 10.5, 2 would be split off.
    """
    sizes = [2 * MIB, 9 * MIB, 19 * MIB // 2]

    assert unsplit_tails(sizes) == 0
    assert unsplit_tails([*sizes, 17 * MIB // 2]) == MIB // 2


def test_a_free_block_is_gone_once_it_is_taken_whole() -> None:
    """In MiB: 2 of 20 leave 18; 17.5 take them with a rest of 0.5; another 17.5 get a segment of 18, again 0.5."""
    assert unsplit_tails([2 * MIB, 35 * MIB // 2]) == MIB // 2
    assert unsplit_tails([2 * MIB, 35 * MIB // 2, 35 * MIB // 2]) == MIB


def test_a_second_copy_finds_what_the_first_has_left() -> None:
    """In MiB: 2 of 20 leave 18. A copy of 17.5 takes these with a rest of 0.5; alone it would get a segment of 18,
    with the same rest; one of 15 takes the 18 and leaves 3, where alone a segment of 16 would leave it 1.
    """
    first = [2 * MIB]

    assert in_turn(first, [35 * MIB // 2]) == [0, MIB // 2]
    assert in_turn(first, [15 * MIB]) == [0, 0]
    assert in_turn([15 * MIB]) == [MIB]


@given(lists=st.lists(st.lists(st.integers(1, 64 * MIB), max_size=8), max_size=4))
def test_lists_in_turn_are_one_list(lists: list[list[int]]) -> None:
    assert sum(in_turn(*lists)) == unsplit_tails([size for sizes in lists for size in sizes])


layers = st.lists(st.integers(MIB // 2, 40 * MIB // 2), max_size=6)


@given(layer=layers, times=st.integers(0, 60), around=st.tuples(layers, layers))
def test_layers_that_are_alike_are_as_if_each_was_looked_at(
    layer: list[int], times: int, around: tuple[list[int], list[int]]
) -> None:
    before, behind = around
    runs = [
        AllocationSequence(tuple(before)),
        AllocationSequence(tuple(layer), times),
        AllocationSequence(tuple(behind)),
    ]

    assert block_sizes.unsplit_remainders(runs, runs) == in_turn(*[[*before, *layer * times, *behind]] * 2)


@given(sizes=st.lists(st.integers(MIB // 2, 24 * MIB), max_size=40))
def test_as_blocks_are_chosen_one_by_one(sizes: list[int]) -> None:
    """Best fit among all free blocks, those that will never do included; a rest of more than 1 MiB is one more."""
    free: list[int] = []
    tails = 0
    for request in map(rounded, sizes):
        if request > MIB:
            fitting = [block for block in free if block >= request]
            made = 20 * MIB if request < 10 * MIB else -(-request // (2 * MIB)) * 2 * MIB
            block = min(fitting, default=made)
            if fitting:
                free.remove(block)
            if block - request <= MIB:
                tails += block - request
            else:
                free.append(block - request)

    assert unsplit_tails(sizes) == tails


@given(sizes=st.lists(st.integers(1, 64 * MIB), max_size=30))
def test_no_tensor_keeps_more_than_1_mib(sizes: list[int]) -> None:
    """And small ones nothing; what is kept is a multiple of 512 bytes, as all blocks are."""
    tails = unsplit_tails(sizes)

    assert 0 <= tails <= MIB * sum(rounded(size) > MIB for size in sizes)
    assert tails % 512 == 0
    assert unsplit_tails([size for size in sizes if size <= MIB]) == 0


@given(sizes=st.lists(st.integers(1, 64), max_size=20))
def test_segments_cover_what_is_allocated(sizes: list[int]) -> None:
    """Tensors of whole 2 MiB from 10 MiB on get segments of their own size: nothing is left of any."""
    assert unsplit_tails([(8 + 2 * size) * MIB for size in sizes]) == 0


def test_the_ledger_counts_rounding_and_rests_beside_the_tensors() -> None:
    """One layer of d = 2048, fp32, before anything but the weights exists.

    Matrices of 4·2048²·(3, 1, 4, 4) = 48, 16, 64, 64 MiB are multiples of 2 MiB; the biases (24, 8, 32, 8 KiB) and
    norms (8 KiB) of 512 bytes; V = 1000 rows of 8 KiB = 7.8125 MiB begin a segment of 20 MiB that no other tensor
    of this model uses. A table of 2500 rows would be 19.53 MiB: the rest of its 20 MiB, 491 520 bytes, stays.
    """
    model = {"num_layers": 1, "hidden_size": 2048, "num_attention_heads": 16, "position_embedding": "none"}
    for vocabulary, rest in ((1000, 0), (2500, 20 * MIB - 4 * 2500 * 2048)):
        run = {"model": model | {"vocab_size": vocabulary}, "training": {"recipe": "fp32"}}
        ledger = memcalc.estimate(run).ledger

        assert ledger.components("model").get(Component.BLOCK_ROUNDING, 0) == rest
        assert ledger.components("model")[Component.WEIGHTS] == 4 * (
            12 * 2048**2 + 13 * 2048 + vocabulary * 2048 + 2 * 2048
        )
