"""A watched backward does in place what an unwatched one does, and computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memcalc.events import EventType
from memcalc.recorder.recorder import Recorder

Program = Callable[[Tensor], Tensor]
INDICES = torch.tensor([1, 2, 2])


def backward(program: Program) -> list[str]:
    """The operators that allocate in the backward of a program of one tensor [6, 4]."""
    x = torch.randn(6, 4, requires_grad=True)
    with Recorder() as recorder:
        output = program(x * 2).sum()
        recorder.begin_phase("backward_1")
        output.backward()
    return [
        event.operator for event in recorder.events() if event.kind is EventType.ALLOC and event.phase == "backward_1"
    ]


def twice(x: Tensor) -> Tensor:
    return x.sin() + x.exp()


def four_times(x: Tensor) -> Tensor:
    return x.sin() + x.exp() + x.cos() + x.tanh()


def both_from_one_node(x: Tensor) -> Tensor:
    return x * x


@pytest.mark.parametrize("program", [twice, four_times, both_from_one_node])
@pytest.mark.parametrize("fake", [False, True])
def test_gradients_that_nothing_else_refers_to_are_summed_in_place(program: Program, fake: bool) -> None:
    if not fake:
        assert "aten.add" not in backward(program)
        return
    with FakeTensorMode():
        assert "aten.add" not in backward(program)


def also_given_on(x: Tensor) -> Tensor:
    """The gradient of x + f(x) goes to both: f's is still to be computed from it when x's buffer holds it."""
    return x + (x.sin() + 0)


def kept_by_a_hook(x: Tensor) -> Tensor:
    kept: list[Tensor] = []
    first = x * 3
    first.register_hook(kept.append)
    y = first.view_as(first)
    y.register_hook(kept.append)
    x.grad_fn.register_hook(lambda *_: kept.clear())  # type: ignore[union-attr]
    return y.exp() + first


def spread(x: Tensor) -> Tensor:
    """The gradient of a sum is one number, expanded."""
    return x.sum() + x.sum(0).sum()


@pytest.mark.parametrize("program", [kept_by_a_hook, spread])
def test_others_are_summed_out_of_place(program: Program) -> None:
    assert "aten.add" in backward(program)


def test_a_hook_that_adds_is_left_alone() -> None:
    def doubled(x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient + gradient)
        return x.exp()

    assert "aten.add" in backward(doubled)


def test_a_backward_in_python_that_adds_is_left_alone() -> None:
    class Adding(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: Tensor) -> Tensor:
            return (gradient * 2) + gradient

    assert "aten.add" in backward(lambda x: Adding.apply(x).exp())


@pytest.mark.parametrize(
    ("program", "in_place"),
    [
        (lambda x: x[INDICES], "aten.index_put"),
        (lambda x: x.index_select(0, INDICES), "aten.index_add"),
        (lambda x: x.gather(0, INDICES[:, None].expand(3, 4)), "aten.scatter_add"),
        (lambda x: x.topk(2)[0], "aten.scatter"),
        (lambda x: x.max(1)[0], "aten.scatter"),
        (lambda x: x.sort()[0], "aten.scatter"),
    ],
)
def test_formulas_write_into_their_own_zeros(program: Program, in_place: str) -> None:
    operators = backward(program)

    assert "aten.new_zeros" in operators or "aten.zeros" in operators
    assert in_place not in operators


def test_what_is_no_formula_of_its_own_zeros_is_left_alone() -> None:
    """The backward of scatter writes zeros into a copy of the gradient, with a mode and without."""
    assert "aten.scatter" in backward(lambda x: x.exp().scatter(0, INDICES[:1, None], 0.0))


@pytest.mark.parametrize(
    "program",
    [twice, four_times, both_from_one_node, also_given_on, kept_by_a_hook, spread, lambda x: x[INDICES].exp()],
)
def test_gradients_are_those_of_an_unwatched_run(program: Program) -> None:
    plain = torch.randn(6, 4, requires_grad=True)
    watched = plain.detach().clone().requires_grad_()
    program(plain * 2).sum().backward()
    with Recorder():
        program(watched * 2).sum().backward()

    assert plain.grad is not None
    assert torch.equal(plain.grad, watched.grad)  # type: ignore[arg-type]
