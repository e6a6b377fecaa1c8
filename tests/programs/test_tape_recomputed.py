"""Tapes of a few operators, compiled: what is kept of recomputed operators, and when they run again."""

from __future__ import annotations

from memcalc.programs.program import Activity
from tests.estimation.stories import block, compile_, names, story


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
        "-x",
        "-gradient of y",
        "-gradient of x",
    ]


def test_recomputation_stops_at_the_last_saved_tensor() -> None:
    """gelu keeps its input y; neither its output nor the scaling behind it runs again (torch.utils.checkpoint)."""
    ops, x = block()
    z = ops.scale(ops.pointwise(ops.pointwise(x, "y"), "gelu(y)"), "z")
    ops.tape.recompute_all()

    done = compile_(ops, z)
    again = [done.storages[event.storage].name for event in done.backward if event.operator.when is Activity.AGAIN]

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
        "-a",
        "-gradient of b",
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
        "-a",
        "-gradient of c",
        "+gradient of x",
        "-x",
        "-gradient of a",
        "-gradient of x",
    ]
    assert names(done, done.left) == ["c"]


def test_tensors_freed_by_then_are_allocated_separately() -> None:
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
        "-a",
        "-gradient of c",
        "+gradient of x",
        "-x",
        "-gradient of a",
        "-gradient of x",
    ]
