"""Operators with cached outputs return the same as without the cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memcalc.tracing.output_cache import KnownOutputs

aten = torch.ops.aten


class Counted:
    """Runs operators and counts how many were not known."""

    def __init__(self) -> None:
        self.known = KnownOutputs()
        self.asked = 0

    def __call__(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """The outputs."""
        return self.known.run(operator, args, kwargs, partial(self._ask, operator, *args, **kwargs))

    def _ask(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        return operator(*args, **kwargs)


@pytest.fixture
def run() -> Iterator[Counted]:
    with FakeTensorMode():
        yield Counted()


def looks(value: Any) -> Any:
    """Return the visible properties of outputs."""
    if isinstance(value, (tuple, list)):
        return type(value), [looks(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (aten.mm.default, ((4, 8), (8, 16))),
        (aten.t.default, ((4, 8),)),
        (aten.slice.Tensor, ((4, 8), 0, 1, 3)),
        (aten.split.Tensor, ((4, 8), 3, 1)),
        (aten.native_layer_norm.default, ((4, 8), [8], (8,), (8,), 1e-5)),
        (
            aten.native_layer_norm_backward.default,
            ((4, 8), (4, 8), [8], (4, 1), (4, 1), None, None, [True, False, False]),
        ),
        (aten._to_copy.default, ((4, 8),)),
        (aten.add_.Tensor, ((4, 8), (8,))),
        (aten._foreach_mul_.Scalar, ([(4, 8), (2,)], 0.9)),
        (aten._foreach_add.Scalar, ([(4, 8), (2,)], 1)),
    ],
)
def test_the_first_and_the_second_time_as_pytorch(run: Counted, operator: Any, args: tuple[Any, ...]) -> None:
    """Tuples of ints stand for tensors of these shapes."""

    def filled(value: Any) -> Any:
        if isinstance(value, tuple):
            return torch.empty(value)
        return [filled(item) for item in value] if isinstance(value, list) else value

    first, second = ([filled(value) for value in args] for _ in range(2))
    before, after = operator(*first), run(operator, *second)
    again = run(operator, *second)

    assert run.asked <= 1
    assert looks(again) == looks(after) == looks(before)
    if operator.is_view:
        outputs = after if isinstance(after, list) else [after]
        assert {out.untyped_storage()._cdata for out in outputs} == {second[0].untyped_storage()._cdata}
    if operator is aten.add_.Tensor:
        assert after is second[0]


def test_equal_numbers_of_other_types_are_other_arguments(run: Counted) -> None:
    """1 == 1.0 == True, but integers plus 1.0 are floats."""
    x = torch.empty(4, dtype=torch.int64)

    made = [run(aten.add.Tensor, x, other).dtype for other in (1, 1.0, True)]

    assert made == [torch.int64, torch.float32, torch.int64]


def test_the_default_dtype_counts(run: Counted) -> None:
    x = torch.empty(4, dtype=torch.int64)
    before = torch.get_default_dtype()

    assert run(aten.div.Tensor, x, 2).dtype == torch.float32
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert run(aten.div.Tensor, x, 2).dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(before)


def test_what_changes_its_arguments_shape_is_always_run(run: Counted) -> None:
    """resize_ returns its argument, which is larger then."""
    for _ in range(2):
        x = torch.empty(4)
        assert run(aten.resize_.default, x, [8]).shape == (8,)
        assert x.shape == (8,)
    assert run.asked == 2


def test_a_slice_of_a_slice_starts_where_it_should(run: Counted) -> None:
    """Two arguments of one shape and stride at different offsets."""
    x = torch.empty(8)

    assert run(aten.slice.Tensor, x[0:4], 0, 1, 2).storage_offset() == 1
    assert run(aten.slice.Tensor, x[4:8], 0, 1, 2).storage_offset() == 5


def test_tensors_without_memory_are_other_arguments(run: Counted) -> None:
    """Sharding builds its model on the meta device, under fake tensors too."""
    on_cpu, on_meta = torch.empty(4, 8), torch.empty(4, 8, device="meta")

    made = [run(aten.t.default, x).device.type for x in (on_cpu, on_meta, on_cpu, on_meta)]

    assert made == ["cpu", "meta", "cpu", "meta"]
