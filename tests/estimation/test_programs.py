"""Programs: what a block leaves to others, how a stream is summed, and every block that ships."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest

from memcalc.api import load
from memcalc.estimation.blocks.catalogue import Gradients, Part, program
from memcalc.estimation.blocks.huggingface import catalogue as huggingface
from memcalc.estimation.blocks.structure import structure_of
from memcalc.estimation.compilation import compiled
from memcalc.estimation.operators import Operators
from memcalc.estimation.program import START, Event, Program, Storage, alive_after, highest
from memcalc.estimation.tape import NEW, SAME, Node, Tape, Tensor
from memcalc.ledger.component import Component
from memcalc.spec.families import attends_eagerly
from memcalc.spec.presets import preset_names
from tests.estimation.stories import AXES, block, compile_, names, story


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
        "+lm_head.weight",
        "+gradient of x",
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
        "+embed sorted indices",
        "+embed.weight",
        "+embed sums",
        "-embed sums",
        "-embed sorted indices",
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
        "+embed sorted indices",
        "+embed gradient before the sum",
        "+embed sums",
        "-embed sums",
        "-embed sorted indices",
        "-gradient of embed output",
        "+embed sum with the tied head's gradient",
        "-embed gradient before the sum",
        "-embed sum with the tied head's gradient",
        "+embed.weight in fp32",  # only now is the gradient complete
    ]
    assert {
        done.storages[event.storage].formula for event in done.backward if "sum" in done.storages[event.storage].name
    } >= {"2·V·k"}


def test_the_highest_moment_of_a_stream() -> None:
    """10, 30, 20, 25: the second event, at 30 bytes; a stream of releases never rises above its start."""
    stream = [Event(0, 1, START), Event(1, 1, START), Event(0, -1, START), Event(2, 1, START)]

    assert highest(stream, [10, 20, 5]) == (30, 2)
    assert highest([Event(0, -1, START)], [10]) == (0, 0)
    assert alive_after(stream) == (1, 2)
    assert alive_after([Event(0, -1, START)], (0, 1)) == (1,)


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


OUTPUTS = {"lm_head output", "scaled logits", "logits, capped"}  # of models, which the loop names
PARTS: tuple[Part, ...] = ("embedding", "dense layer", "expert layer", "head")


def programs_of(preset: str) -> Iterable[tuple[str, Program]]:
    """Every part of a model, in every combination of choices that changes what runs."""
    choices = (("plain", "huggingface"), ("pure", "amp"), ("eager", "flash"), ("none", "selective"))
    for implementation, recipe, attention, recompute in product(*choices):
        chosen = f"implementation={implementation} recipe={recipe} attention={attention} recompute={recompute}"
        if attention != "eager" and attends_eagerly(load(preset).model.architecture, implementation):
            continue
        if attention == "flash" and implementation == "huggingface" and load(preset).model.mla is not None:
            continue  # PyTorch's wants values as wide as keys
        spec = load(preset, *chosen.split(), "dropout=0.1", "b=2")
        if implementation == "huggingface" and not huggingface.is_written(structure_of(spec)):
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
        assert alive == {*done.kept, *done.region, *done.names} - {*done.named_output}, which
        alive = set(done.kept)
        for event in done.backward:
            assert (event.storage in alive) == (event.sign < 0), (which, event)
            alive ^= {event.storage}
        held = {index for index in alive if done.storages[index].component is not Component.GRADIENTS}
        if done.loss:
            assert set(names(done, held)) - OUTPUTS == {"loss", "gradient of loss"}, which
        else:
            assert not held, (which, names(done, held))
