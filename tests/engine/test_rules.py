"""Rules of workspaces over many batches, beside single ones, and how often they are asked."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from memcalc.engine import rules as module
from memcalc.engine.reading import changed
from memcalc.engine.rules import Batches, Found, Rules, Symbols
from memcalc.estimation import workspaces
from memcalc.estimation.allocation import rounded
from memcalc.estimation.program import Kind
from memcalc.estimation.symbols import symbol_values
from memcalc.spec.cards import find_card
from memcalc.spec.loading import load

A100 = find_card("a100-80gb")
GPT2 = load("gpt2", [])
HEADS = (("heads", "h"), ("head_dim", "d_h"), ("length", "s"), ("item_bytes", 2))
GROUPS = (*HEADS[:1], ("kv_heads", "h_kv"), *HEADS[1:])

KINDS = [
    Kind((), 1, workspaces.column_sum, (("rows", ("b", "s")), ("columns", ("3·d",)))),
    Kind((), 1, workspaces.embedding_backward, (("tokens", ("b", "s")), ("rows", "V"), ("width", "d"))),
    Kind((), 1, workspaces.embedding_backward, (("tokens", ("d", "s", "b")), ("rows", "V"), ("width", "d"))),
    Kind((), 1, workspaces.flash_backward, GROUPS),
    Kind((), 1, workspaces.efficient_forward, (*HEADS, ("value_dim", "d_h"))),
    Kind((), 1, workspaces.efficient_backward, (*HEADS, ("value_dim", "d_h"))),
    Kind((), 1, workspaces.log_sum_exp_rows, (("heads", "h"), ("length", "s"))),
    Kind((), 1, workspaces.product, (("axes", ("b", "d", "s", "s")),)),  # nothing but a product
    Kind((), 1, workspaces.product, (("axes", ("d", "V")),)),  # no batch decides
]


def symbols(b: Any, s: Any) -> Symbols:
    mesh = np.meshgrid(np.array(b, dtype=np.int64), np.array(s, dtype=np.int64), indexing="ij")
    return Symbols(GPT2, A100, Batches._make(each.ravel() for each in mesh))


def every(found: int | Found, count: int) -> list[tuple[int, int]]:
    """Bytes of each batch, and what the allocator hands out for them."""
    if isinstance(found, int):
        return [(found, rounded(found))] * count
    exact, block = found.of(slice(None))
    return list(zip(exact.tolist(), block.tolist(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("b", "s"),
    [
        (range(1, 20), range(1, 700, 3)),
        ([1, 7, 4096], [64, 1000, 70_000, 1_000_000]),  # few numbers, far apart
        ([3], [1024]),
    ],
)
def test_a_rule_gives_what_it_gives_for_each_batch(kind, b, s):
    found = Rules().bytes(kind, symbols(b, s))
    singles = [
        kind.bytes(symbol_values(changed(GPT2, micro_batch_size=one, sequence_length=two), A100))
        for one, two in product(b, s)
    ]
    assert every(found, len(singles)) == [(size, rounded(size)) for size in singles]


def test_some_of_the_batches_are_picked():
    found = Rules().bytes(KINDS[1], symbols([1, 4], [1024, 2048, 4096]))
    assert isinstance(found, Found)
    whole, _ = found.of(slice(None))
    some, _ = found.of(np.array([5, 1]))
    assert some.tolist() == [whole[5], whole[1]]


def test_a_rule_is_asked_once_for_each_number_that_it_knows():
    asked: list[list[int]] = []

    def rule(values: Any) -> Any:
        tokens = values["b"] * values["s"]
        bits = tokens.bit_length()  # without deciding anything
        asked.append(tokens.values.tolist())
        return bits * values["d"]

    kind, rules = Kind((), 1, rule), Rules()
    found = rules.bytes(kind, symbols([1, 2, 3, 4], [2, 4, 6]))

    assert asked == [[2, 4, 6, 8, 12, 16, 18, 24]]
    assert isinstance(found, Found)
    assert rules.bytes(kind, symbols([1, 2, 3, 4], [2, 4, 6])) is found
    assert len(asked) == 1


def test_a_rule_may_ask_for_more_where_it_decides_otherwise():
    def rule(values: Any) -> Any:
        return values["b"] if values["s"] > 4 else values["b"] * values["d"]

    found = Rules().bytes(Kind((), 1, rule), symbols([1, 2], [4, 8]))
    assert [size for size, _ in every(found, 4)] == [768, 1, 2 * 768, 2]


def test_numbers_are_found_whether_they_are_close_or_not(monkeypatch):
    array = np.array([6, 2, 6, 3, 2], dtype=np.int64)
    close = module._distinct(array)
    monkeypatch.setattr(module, "CLOSE", 0)
    far = module._distinct(array)
    for numbers, where in (close, far):
        assert numbers.tolist() == [2, 3, 6]
        assert where.tolist() == [2, 0, 2, 1, 0]
