"""Tapes of a few operators, compiled: what is saved for backward, and what becomes of gradients."""

from __future__ import annotations

import pytest

from memcalc.ledger.component import Component
from tests.estimation.stories import AXES, block, compile_, names, story


def test_forward_saves_tensors_and_backward_frees_them() -> None:
    """gelu keeps its input x, relu its output z; y, which neither needs, goes with its last reader."""
    ops, x = block()
    z = ops.pointwise(ops.pointwise(x, "y"), "z", saves="output")

    done = compile_(ops, z)

    assert story(done, done.forward) == ["+x", "+y", "+z", "-y"]
    assert names(done, done.kept) == ["x", "z"]
    assert story(done, done.backward) == [
        "+gradient of z",  # what the block behind hands over
        "+gradient of y",  # relu
        "-z",
        "-gradient of z",
        "+gradient of x",  # gelu
        "-x",
        "-gradient of y",
        "-gradient of x",  # it belongs to the block before
    ]
    assert done.left == ()


def test_an_output_that_nobody_keeps_is_the_next_blocks() -> None:
    """The next block counts it as its input, so this one frees it at its end."""
    ops, x = block()

    done = compile_(ops, ops.scale(x, "y"))

    assert story(done, done.forward) == ["+x", "+y", "-x", "-y"]
    assert done.kept == ()


def test_dropout_keeps_its_mask_and_nothing_at_rate_0() -> None:
    ops, x = block()
    done = compile_(ops, ops.dropout(x, "drop", 0.1))

    assert [done.storages[index].formula for index in done.kept] == ["1·n·k"]
    assert names(done, done.kept) == ["drop mask"]
    assert ops.dropout(x, "drop", 0.0) is x


def test_a_linear_layer_keeps_its_input_and_leaves_the_gradients_of_its_parameters() -> None:
    """dx, dW, db in this order, then the staging of db's column sum, which is gone before the operator ends."""
    ops, x = block()
    y = ops.linear(x, "fc", ("m", "k"), ("n", "m"), bias=True)

    done = compile_(ops, y)

    assert names(done, done.kept) == ["x"]
    assert story(done, done.backward) == [
        "+gradient of fc output",
        "+gradient of x",
        "+fc.weight",
        "+fc.bias",
        "+fc bias sum",
        "-fc bias sum",
        "-x",
        "-gradient of fc output",
        "-gradient of x",
    ]
    assert names(done, done.left) == ["fc.weight", "fc.bias"]


def test_a_power_has_two_factors_in_backward_that_live_until_their_product_is_there() -> None:
    """gradient * (exponent * x^(exponent - 1)): torch/csrc/autograd/FunctionsManual.cpp, pow_backward."""
    ops, x = block()

    done = compile_(ops, ops.pow(x, "y"))

    assert names(done, done.kept) == ["x"]
    factors = ["y: the lower power", "y: times the exponent"]
    made, gone = story(done, done.backward)[1:4], story(done, done.backward)[4:]
    assert made == [*(f"+{factor}" for factor in factors), "+gradient of x"]
    assert gone[:3] == [*(f"-{factor}" for factor in factors), "-x"]


def test_softmax_needs_a_temporary_of_its_own_size_in_backward() -> None:
    ops, x = block()
    done = compile_(ops, ops.softmax(x, "p"))

    assert story(done, done.backward) == [
        "+gradient of p",
        "+gradient of x",
        "+p gradient times output",
        "-p gradient times output",
        "-p",
        "-gradient of p",
        "-gradient of x",
    ]


def test_a_norm_keeps_its_input_and_a_number_or_two_for_each_row() -> None:
    """LayerNorm: mean and reciprocal deviation; RMSNorm: the latter. Both fp32, also for a 16-bit input."""
    for norm, numbers in (("layer_norm", ["mean", "reciprocal deviation"]), ("rms_norm", ["reciprocal deviation"])):
        ops, x = block()
        done = compile_(ops, getattr(ops, norm)(x, "norm", "k"))

        assert names(done, done.kept) == ["x", *(f"norm {number}" for number in numbers)]
        assert [done.storages[index].formula for index in done.kept] == ["2·n·k", *("4·n" for _ in numbers)]


def test_both_summands_get_the_same_gradient_and_a_residual_sum_accumulates_in_place() -> None:
    """y = x + gelu(x): the gradient of y is x's first one, gelu's is added into it and goes: no third tensor."""
    ops, x = block()
    y = ops.add(x, ops.pointwise(x, "branch"), "y")

    done = compile_(ops, y)

    assert story(done, done.backward) == [
        "+gradient of y",
        "+gradient of x",  # gelu's
        "-x",
        "-gradient of x",  # added into the gradient of y, to which nothing else refers any more
        "-gradient of y",
    ]


def test_a_gradient_that_something_else_refers_to_is_not_overwritten() -> None:
    """y = x + (x + 1): both gradients of x are the one of y, so their sum is a tensor of its own."""
    ops, x = block()
    y = ops.add(x, ops.shift(x, "x + 1"), "y")

    done = compile_(ops, y)

    assert story(done, done.backward) == [
        "+gradient of y",
        "+gradient of x",
        "-gradient of y",
        "-gradient of x",
    ]
    assert done.storages[done.backward[1].storage].formula == "2·n·k"


def test_views_have_gradients_of_their_own_that_are_joined_in_a_new_tensor() -> None:
    """q, k = split(x): backward makes one gradient as large as x of two halves."""
    ops, x = block()
    half = ("n", "k/2")
    q, k = ops.split(x, (half, half), "q, k")
    y = ops.matmul(q, k, "y", ("n", "n"))

    done = compile_(ops, y)
    gradients = [done.storages[event.storage].shape for event in done.backward if event.sign > 0]

    assert names(done, done.kept) == ["x"]  # the views' storage, once
    assert gradients == [("n", "n"), half, half, AXES]
    assert story(done, done.backward)[-4:] == ["+gradient of x", "-gradient of x", "-gradient of x", "-gradient of x"]


def test_the_gradient_of_an_input_without_one_is_not_made() -> None:
    """x · table: only x's."""
    ops, x = block()
    table = ops.tape.new("table", AXES, "bf16", "", grad=False)
    ops.tape.hold(table)
    done = compile_(ops, ops.mul(x, table, "y"))

    assert names(done, done.kept) == ["table"]  # x is table's partner, and the table needs no gradient
    assert [name for name in story(done, done.backward) if name.startswith("+")] == [
        "+gradient of y",
        "+gradient of x",
    ]


@pytest.mark.parametrize(
    ("kept", "main", "left"),
    [
        (True, None, ["fc.weight"]),
        (False, None, []),  # added to one that exists already, and dropped
        (True, "fp32", ["fc.weight", "fc.weight in fp32"]),  # mixed-20
        (False, "fp32", ["fc.weight in fp32"]),
    ],
)
def test_what_becomes_of_a_parameters_gradient(kept: bool, main: str | None, left: list[str]) -> None:
    ops, x = block()
    done = compile_(ops, ops.linear(x, "fc", ("m", "k"), ("n", "m"), bias=False), kept=kept, main=main)

    assert names(done, done.left) == left
    assert {done.storages[index].component for index in done.left} <= {Component.GRADIENTS}
    assert "+fc.weight" in story(done, done.backward)


def test_components_follow_from_what_is_saved() -> None:
    """What backward needs is an activation, gradients of parameters are gradients, the rest is temporary."""
    ops, x = block()
    done = compile_(ops, ops.linear(ops.pointwise(x, "gelu"), "fc", ("m", "k"), ("n", "m"), bias=False))
    of = {storage.name: storage.component for storage in done.storages}

    assert of["x"] is of["gelu"] is Component.ACTIVATIONS
    assert of["fc.weight"] is Component.GRADIENTS
    assert of["gradient of x"] is of["fc output"] is Component.TEMPORARIES
