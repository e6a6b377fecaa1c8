"""Tapes of a few operators, compiled: each allocation and release is one that can be followed by hand.

A story is the list of a stream's events: "+x" where x is allocated, "-x" where it is let go. Gradients are called as
the tensors they belong to: "gradient of x".
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest

from memcalc.api import load
from memcalc.estimation.blocks import huggingface
from memcalc.estimation.blocks.catalogue import Gradients, Part, program
from memcalc.estimation.blocks.structure import structure_of
from memcalc.estimation.compilation import compiled
from memcalc.estimation.operators import Operators
from memcalc.estimation.program import Event, Program, Storage, alive_after, highest
from memcalc.estimation.tape import NEW, SAME, Node, Tape, Tensor
from memcalc.ledger.component import Component
from memcalc.spec.presets import preset_names

AXES = ("n", "k")


def block(*, compute: str = "bf16", parameters: str = "bf16", autocast: bool = False) -> tuple[Operators, Tensor]:
    """An empty tape with its input."""
    tape = Tape()
    x = tape.input("x", AXES, parameters, "")
    return Operators(tape, compute, parameters, autocast), x


def compile_(ops: Operators, output: Tensor | None, *, kept: bool = True, main: str | None = None) -> Program:
    return compiled(ops.tape, output, keeps_gradients=kept, main_gradient_dtype=main)


def story(done: Program, events: Iterable[Event]) -> list[str]:
    return [f"{'+' if event.sign > 0 else '-'}{done.storages[event.storage].name}" for event in events]


def names(done: Program, storages: Iterable[int]) -> list[str]:
    return [done.storages[index].name for index in storages]


# -- what is saved -----------------------------------------------------------------------------------------------------


def test_forward_keeps_what_backward_needs_and_backward_lets_it_go() -> None:
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
    """The next block counts it as its input, so this one lets it go as it ends."""
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
    assert made == ["+gradient of x", *(f"+{factor}" for factor in factors)]
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


# -- gradients ---------------------------------------------------------------------------------------------------------


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


# -- recomputation -----------------------------------------------------------------------------------------------------


def test_a_recomputed_block_keeps_its_input_and_runs_again_in_backward() -> None:
    ops, x = block()
    z = ops.pointwise(ops.pointwise(x, "y"), "z", saves="output")
    ops.tape.recompute_all()

    done = compile_(ops, z)

    assert story(done, done.forward) == ["+x", "+y", "+z", "-y", "-z"]
    assert names(done, done.kept) == ["x"]
    assert story(done, done.backward) == [
        "+gradient of z",
        "+y",  # gelu again
        "+z",  # relu again
        "-y",
        "+gradient of y",
        "-z",
        "-gradient of z",
        "+gradient of x",
        "-gradient of y",
        "-x",
        "-gradient of x",
    ]


def test_recomputation_stops_at_the_last_saved_tensor() -> None:
    """gelu keeps its input y; neither its output nor the scaling behind it runs again (torch.utils.checkpoint)."""
    ops, x = block()
    z = ops.scale(ops.pointwise(ops.pointwise(x, "y"), "gelu(y)"), "z")
    ops.tape.recompute_all()

    done = compile_(ops, z)
    again = [done.storages[event.storage].name for event in done.backward if event.label.endswith("again")]

    assert again == ["y"]
    assert "+gelu(y)" not in story(done, done.backward)


def test_a_segment_keeps_its_inputs_beside_what_the_rest_saves() -> None:
    """x -> a -> [b -> c] -> d: of the segment only its input a, which its first operator would have kept too."""
    ops, x = block()
    a = ops.pointwise(x, "a")
    c = ops.pointwise(ops.pointwise(a, "b"), "c", saves="output")
    ops.tape.recompute(c, (a,))
    d = ops.scale(c, "d")

    done = compile_(ops, d)

    assert names(done, done.kept) == ["x", "a"]
    assert story(done, done.backward) == [
        "+gradient of d",
        "+gradient of c",
        "-gradient of d",
        "+b",
        "+c",
        "-b",
        "+gradient of b",
        "-c",
        "-gradient of c",
        "+gradient of a",
        "-gradient of b",
        "-a",
        "+gradient of x",
        "-x",
        "-gradient of a",
        "-gradient of x",
    ]


def test_what_something_outside_a_segment_still_keeps_is_made_a_second_time() -> None:
    """The caller holds c until the step ends; the segment's own c is another tensor of the same size."""
    ops, x = block()
    a = ops.pointwise(x, "a")
    c = ops.pointwise(a, "c", saves="output")
    ops.tape.recompute(c, (a,))
    ops.tape.hold(c)

    done = compile_(ops, c)

    assert names(done, done.kept) == ["x", "a", "c"]
    assert story(done, done.backward) == [
        "+gradient of c",
        "+c again",
        "+gradient of a",
        "-c again",
        "-gradient of c",
        "-a",
        "+gradient of x",
        "-x",
        "-gradient of a",
        "-gradient of x",
    ]
    assert names(done, done.left) == ["c"]


def test_what_the_rest_has_let_go_of_by_then_is_made_in_its_own_place() -> None:
    """gelu behind the segment keeps c, but its backward is over when the segment runs again."""
    ops, x = block()
    a = ops.pointwise(x, "a")
    c = ops.pointwise(a, "c", saves="output")
    ops.tape.recompute(c, (a,))
    done = compile_(ops, ops.pointwise(c, "d"))

    assert story(done, done.backward) == [
        "+gradient of d",
        "+gradient of c",
        "-c",
        "-gradient of d",
        "+c",
        "+gradient of a",
        "-c",
        "-gradient of c",
        "-a",
        "+gradient of x",
        "-x",
        "-gradient of a",
        "-gradient of x",
    ]


# -- autocast ----------------------------------------------------------------------------------------------------------


def test_autocast_keeps_casts_of_input_and_weight_and_drops_the_biass_with_its_region() -> None:
    """x 4·n·k is not needed itself; its cast 2·n·k and the weight's 2·m·k are saved, the bias's only cached."""
    ops, x = block(parameters="fp32", autocast=True)
    y = ops.linear(x, "fc", ("m", "k"), ("n", "m"), bias=True)

    done = compile_(ops, y)

    assert [(done.storages[index].name, done.storages[index].formula) for index in done.kept] == [
        ("fc input in bf16", "2·n·k"),
        ("fc.weight in bf16 (autocast cache)", "2·m·k"),
    ]
    assert names(done, done.region) == ["fc.bias in bf16 (autocast cache)"]
    assert set(done.saved) == {*done.kept, *done.region}
    assert done.storages[done.region[0]].component is Component.TEMPORARIES


def test_a_cast_hands_back_a_gradient_in_the_old_dtype() -> None:
    """The matrix product's gradients are bf16; the casts behind them make the fp32 ones, and bf16's go one by one."""
    ops, x = block(parameters="fp32", autocast=True)
    done = compile_(ops, ops.linear(x, "fc", ("m", "k"), ("n", "m"), bias=False))

    assert story(done, done.backward) == [
        "+gradient of fc output",
        "+gradient of fc input in bf16",
        "+gradient of fc.weight in bf16 (autocast cache)",
        "-fc input in bf16",
        "-fc.weight in bf16 (autocast cache)",
        "-gradient of fc output",
        "+fc.weight",
        "-gradient of fc.weight in bf16 (autocast cache)",
        "+gradient of x",
        "-gradient of fc input in bf16",
        "-gradient of x",
    ]
    dtype = {storage.name: storage.dtype for storage in done.storages}
    assert dtype["fc.weight"] == dtype["gradient of x"] == "fp32"
    assert dtype["gradient of fc.weight in bf16 (autocast cache)"] == "bf16"


def test_each_use_of_an_activation_is_cast_anew() -> None:
    """Only casts of leaves are cached: q and k of the same x each keep a cast of it."""
    ops, x = block(parameters="fp32", autocast=True)
    q = ops.linear(x, "q", ("m", "k"), ("n", "m"), bias=False)
    k = ops.linear(x, "k", ("m", "k"), ("n", "m"), bias=False)
    done = compile_(ops, ops.matmul(q, k, "scores", ("n", "n")))

    assert [name for name in names(done, done.kept) if "input" in name] == ["q input in bf16", "k input in bf16"]


def test_norms_and_softmax_run_in_fp32_under_autocast() -> None:
    ops, x = block(parameters="fp32", autocast=True)
    y = ops.linear(x, "fc", ("m", "k"), ("n", "m"), bias=False)

    assert y.dtype == "bf16"
    assert ops.layer_norm(y, "norm", "m").dtype == ops.softmax(y, "p").dtype == "fp32"


# -- across blocks -----------------------------------------------------------------------------------------------------


def test_what_the_caller_holds_outlives_backward() -> None:
    """The head's logits: the model's output is a variable of the training loop."""
    ops, x = block()
    logits = ops.linear(x, "lm_head", ("V", "k"), ("n", "V"), bias=False)
    ops.tape.hold(logits)
    ops.tape.end_forward()
    ops.cross_entropy(logits)

    done = compile_(ops, None)

    assert story(done, done.forward) == ["+x", "+lm_head output"]
    assert story(done, done.loss) == ["+log-probabilities", "+loss", "+loss total weight"]
    assert story(done, done.backward) == [
        "+gradient of loss",  # held by the caller of backward()
        "+gradient of log-probabilities",  # nll_loss
        "-loss total weight",
        "+gradient of lm_head output",  # log_softmax; the log-probabilities were nll_loss's too
        "-log-probabilities",
        "-gradient of log-probabilities",
        "+gradient of x",
        "+lm_head.weight",
        "-x",
        "-gradient of lm_head output",
        "-gradient of x",
    ]
    assert names(done, done.left) == ["lm_head output", "loss", "gradient of loss", "lm_head.weight"]


def test_tables_that_all_layers_share_go_when_backward_reaches_the_first_block() -> None:
    """The first block has no input; its tables are there when forward begins."""
    tape = Tape()
    tape.hold(Tensor(tape.store("table", ("s", "s"), "bool", ""), ("s", "s"), "bool"))
    ops = Operators(tape, "bf16", "bf16", autocast=False)
    done = compile_(ops, ops.embedding("embed", ("V", "k"), ("n",)))

    assert story(done, done.forward) == ["+table", "+embed output", "-embed output"]
    assert names(done, done.kept) == ["table"]
    assert story(done, done.backward) == [
        "+gradient of embed output",
        "-table",
        "+embed.weight",
        "+embed sort and sums",
        "-embed sort and sums",
        "-gradient of embed output",
    ]


@pytest.mark.parametrize("autocast", [False, True])
def test_the_tied_heads_gradient_waits_although_others_are_dropped(autocast: bool) -> None:
    """A shared leaf's gradient is added up only when both ends have made theirs; the bias is the head's alone."""
    ops, x = block(parameters="fp32" if autocast else "bf16", autocast=autocast)
    logits = ops.linear(x, "lm_head", ("V", "k"), ("n", "V"), bias=True, tied=True)

    done = compile_(ops, logits, kept=False)

    assert names(done, done.left) == ["lm_head.weight"]


def test_the_tied_embedding_makes_its_gradient_and_the_sum_beside_the_heads() -> None:
    """Three tensors of V·k: the head's, which its block counts, the embedding's and their sum."""
    tape = Tape()
    ops = Operators(tape, "bf16", "bf16", autocast=False)
    done = compile_(ops, ops.embedding("embed", ("V", "k"), ("n",), tied=True), main="fp32")

    assert story(done, done.backward) == [
        "+gradient of embed output",
        "+embed sort and sums",
        "+embed gradient before the sum",
        "+embed sum with the tied head's gradient",
        "-embed sort and sums",
        "-embed gradient before the sum",
        "-embed sum with the tied head's gradient",
        "-gradient of embed output",
        "+embed.weight in fp32",  # only now is the gradient complete
    ]
    assert {
        done.storages[event.storage].formula for event in done.backward if "sum" in done.storages[event.storage].name
    } >= {"2·V·k"}


# -- programs ----------------------------------------------------------------------------------------------------------


def test_the_highest_moment_of_a_stream() -> None:
    """10, 30, 20, 25: the second event, at 30 bytes; a stream of releases never rises above its start."""
    stream = [Event(0, 1, ""), Event(1, 1, ""), Event(0, -1, ""), Event(2, 1, "")]

    assert highest(stream, [10, 20, 5]) == (30, 2)
    assert highest([Event(0, -1, "")], [10]) == (0, 0)
    assert alive_after(stream) == (1, 2)
    assert alive_after([Event(0, -1, "")], (0, 1)) == (1,)


def test_sizes_are_products_of_axes_or_a_rules_bytes() -> None:
    """2·3·5 bytes of bf16, 3 of a mask, and 7·n by rule."""

    def rule(values: object) -> int:
        """7 bytes a row."""
        return 7 * values["n"]  # type: ignore[index, no-any-return]

    storages = (
        Storage("x", ("n", "k"), "bf16", ""),
        Storage("mask", ("n",), "bool", ""),
        Storage("scratch", (), "uint8", "", rule),
        Storage("sum", ("n", "k+1"), "fp32", ""),
    )
    done = Program(storages, (), (), ())

    assert done.sizes({"n": 3, "k": 5, "k+1": 6}) == [30, 3, 21, 72]
    assert tuple(storage.formula for storage in done.storages) == ("2·n·k", "1·n", "7 bytes a row", "4·n·(k+1)")


def test_a_hand_written_node_is_all_that_an_operator_is() -> None:
    """An operator that keeps its output and hands its gradient on to one input, with a temporary in forward."""
    tape = Tape()
    x = tape.input("x", AXES, "bf16", "")
    y = tape.new("y", AXES, "bf16", "")
    scratch = tape.store("scratch", AXES, "fp32", "")
    tape.nodes.append(Node("op", (x, x), (y,), (y.storage,), (SAME, NEW), forward_temporaries=(scratch,)))
    done = compiled(tape, y, keeps_gradients=True, main_gradient_dtype=None)

    assert story(done, done.forward) == ["+x", "+y", "+scratch", "-scratch", "-x"]
    assert story(done, done.backward) == [
        "+gradient of y",
        "+gradient of x",
        "-y",
        "-gradient of x",  # added into y's gradient, which is x's first one
        "-gradient of y",
    ]


# -- every block that ships --------------------------------------------------------------------------------------------

PARTS: tuple[Part, ...] = ("embedding", "dense layer", "expert layer", "head")


def programs_of(preset: str) -> Iterable[tuple[str, Program]]:
    """Every part of a model, in every combination of choices that changes what runs."""
    choices = (("plain", "huggingface"), ("pure", "amp"), ("eager", "flash"), ("none", "selective"))
    for implementation, recipe, attention, recompute in product(*choices):
        chosen = f"implementation={implementation} recipe={recipe} attention={attention} recompute={recompute}"
        spec = load(preset, *chosen.split(), "dropout=0.1", "b=2")
        if implementation == "huggingface" and spec.model.architecture not in huggingface.FAMILIES:
            continue
        for part, again in product(PARTS, (False, True)):
            if part != "expert layer" or spec.model.moe is not None:
                done = program(
                    structure_of(spec), part, again and "layer" in part, Gradients(kept=True, main_dtype=None)
                )
                yield f"{part}, {chosen}, recomputed: {again}", done


@pytest.mark.parametrize("preset", preset_names())
def test_every_blocks_books_balance(preset: str) -> None:
    """Nothing is allocated twice or let go twice; backward leaves gradients and what the caller holds, nothing else."""
    for which, done in programs_of(preset):
        alive: set[int] = set()
        for event in (*done.forward, *done.loss):
            assert (event.storage in alive) == (event.sign < 0), (which, event)
            alive ^= {event.storage}
        assert alive == {*done.kept, *done.region, *done.names}, which
        alive = set(done.kept)
        for event in done.backward:
            assert (event.storage in alive) == (event.sign < 0), (which, event)
            alive ^= {event.storage}
        held = {index for index in alive if done.storages[index].component is not Component.GRADIENTS}
        if done.loss:
            assert set(names(done, held)) == {"lm_head output", "loss", "gradient of loss"}, which
        else:
            assert not held, (which, names(done, held))
