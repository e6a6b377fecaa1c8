"""What a plan needs, counted by hand."""

import pytest
from hypothesis import given

from memcalc.errors import InputError
from memcalc.recomputation.chain import Chain, ChainBlock, join, simple_block
from memcalc.recomputation.evaluation import evaluate, evaluate_without_recomputation
from memcalc.recomputation.plan import depth, leaves, recompute_counts
from tests.recomputation.chains import random_chains, uniform


def chain_of_three() -> Chain:
    """Boundaries of 10 bytes, 100 inside, 7 FLOPs a block; the last one hands nothing on."""
    return Chain(
        (
            simple_block("a", 10, 100, 10, 7),
            simple_block("b", 10, 100, 10, 7),
            simple_block("c", 10, 100, 0, 7),
        ),
        resident=1000,
    )


def test_everything_kept() -> None:
    found = evaluate_without_recomputation(chain_of_three())

    # In c's backward: a and b with their outputs, 2·(100 + 10); the first input; c's inside, the gradient of its input.
    assert found.peak_bytes == 1000 + 10 + 2 * (100 + 10) + 100 + 10
    assert (found.peak.phase, found.peak.block) == ("backward", "c")
    assert found.saved_bytes == 10 + 2 * (100 + 10) + 100
    assert (found.flops, found.recompute_flops) == (21, 0)


def test_a_segment_keeps_its_input_and_runs_again() -> None:
    found = evaluate(chain_of_three(), ((0, 1), 2), record=True)

    assert found.recompute_flops == 7 + 7
    assert found.saved_bytes == 10 + 10 + 100  # both inputs; what is inside c
    # Forward: a, b, c; backward of c; a again, b again with its backward, backward of a.
    assert [(moment.phase, moment.block) for moment in found.points] == [
        ("forward", "a"),
        ("forward", "b"),
        ("forward", "c"),
        ("backward", "c"),
        ("again", "a"),
        ("again", "b"),
        ("backward", "a"),
    ]
    assert [moment.bytes - 1000 for moment in found.points] == [
        10 + 10,  # a's input and output
        10 + 10 + 10,  # a's input, which stays; b's input and output
        10 + 10 + 100,  # a's input, c's input and inside
        10 + 10 + 100 + 10,  # the gradient of c's input with it
        10 + 100 + 10 + 10,  # a as a whole, and the gradient of b's output
        10 + 100 + 10 + 100 + 10 + 10,  # b's input and inside beside a, gradients of b's output and input
        10 + 100 + 10 + 10,  # gradients of a's output and input
    ]


def test_a_segment_inside_a_segment_runs_twice_more() -> None:
    found = evaluate(chain_of_three(), (((0,), 1), 2))

    assert recompute_counts((((0,), 1), 2)) == {0: 2, 1: 1, 2: 0}
    assert found.recompute_flops == 2 * 7 + 7
    assert depth((((0,), 1), 2)) == 2


def test_gradients_of_parameters_pile_up() -> None:
    layer = simple_block("layer", 10, 0, 10, 1, left_bytes=50)
    chain = Chain((layer, layer, layer._replace(output_bytes=0)))

    moments = evaluate(chain, (0, 1, 2), record=True).points
    backward = [moment.bytes for moment in moments if moment.phase == "backward"]

    # Each backward has its own gradients of 50 bytes, and those of the layers behind it.
    held = (10 + 10 + 10 + 10, 10 + 10 + 10 + 10, 10 + 10 + 10)  # inputs up to the layer's, two gradients
    assert [amount - there for amount, there in zip(backward, held, strict=True)] == [50 + 10, 100, 150]


def test_moments_that_no_plan_changes_count_as_well() -> None:
    chain = Chain((simple_block("a", 1, 1, 1, 1),), elsewhere=99, elsewhere_name="optimizer_step_1")

    assert evaluate(chain, (0,)).peak[:2] == (99, "optimizer_step_1")


def test_branches_wait_for_their_join() -> None:
    branch = (simple_block("in", 8, 0, 20, 1), simple_block("out", 20, 0, 3, 1))
    chain = join((branch, branch), 8, (simple_block("join", 6, 0, 0, 1, recomputable=False),))

    moments = {(m.phase, m.position): m.bytes for m in evaluate(chain, range_of(chain), record=True).points}

    assert moments["forward", 0] == 8 + 20
    assert moments["forward", 1] == 8 + 20 + 3
    assert moments["forward", 2] == 8 + 20 + 3 + 20  # the first branch keeps its 20 and has made its 3
    assert moments["forward", 3] == 8 + 20 + 3 + 20 + 3
    assert chain.reach == (2, 2, 4, 4, 4)  # nothing is recomputed across branches


def range_of(chain: Chain) -> tuple[int, ...]:
    return tuple(range(len(chain)))


def test_shares_must_make_up_what_is_joined() -> None:
    with pytest.raises(InputError, match="the branches make 20 bytes, but join takes 6"):
        join(((simple_block("in", 8, 0, 20, 1),),), 8, (simple_block("join", 6, 0, 0, 1),))


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ((), "the chain has no blocks"),
        ((simple_block("a", 1, 1, 2, 1), simple_block("b", 3, 1, 1, 1)), "a outputs 2 bytes, but b reads 3"),
        ((simple_block("a", 1, -1, 2, 1),), "a: inside_bytes = -1 is negative"),
    ],
)
def test_what_is_no_chain_is_refused(blocks: tuple[ChainBlock, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Chain(blocks)


@given(random_chains(6))
def test_keeping_everything_costs_nothing(chain: Chain) -> None:
    found = evaluate_without_recomputation(chain)

    assert found.recompute_flops == 0
    assert found.flops == chain.flops


def test_leaves_are_in_order() -> None:
    assert list(leaves((0, ((1, 2), 3), 4))) == [0, 1, 2, 3, 4]


def test_chens_chain() -> None:
    """ceil(l/k)·B + k·A, A being all of a layer, its boundary included (arXiv 1604.06174 section 4.1)."""
    chain = uniform(12, inside=32, boundary=2)
    segments = tuple(tuple(range(start, start + 3)) for start in range(0, 12, 3))

    assert evaluate(chain, (*segments, 12)).peak_bytes == (12 // 3) * 2 + 3 * 34
