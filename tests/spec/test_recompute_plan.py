"""Plans of recomputation in a configuration."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc.errors import InputError
from memcalc.report.screens.verdict import subject
from memcalc.spec.recompute_plan import Segment, as_recompute, items_of, words


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ([3, 5], (3, 5)),
        ([[3], 5], (3, 5)),  # a list of one layer is that layer
        ([[0, 1, 2], "4-7"], ((0, 1, 2), (4, 5, 6, 7))),
        ([["0-2", 3], [[4], 5]], (((0, 1, 2), 3), ((4,), 5))),
    ],
)
def test_lists_and_ranges_are_read(written: list[Any], read: Segment) -> None:
    spec = memcalc.load({"preset": "gpt2", "training": {"recompute": written}})

    assert spec.training.recompute == read
    assert memcalc.load(spec.model_dump(mode="json")).training.recompute == read


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("[[2,1]]", "recompute: the layers of a segment must be consecutive"),
        ("[[0,1],1]", "must be consecutive and unique"),
        ("[10-12]", "recompute names layer 12, but the layers are 0 to 11"),
        ("[[]]", "recompute = a list is not a valid value"),
        ("[5-3]", "recompute = a list is not a valid value"),
        ("[true]", "recompute = a list is not a valid value"),
    ],
)
def test_what_is_no_plan_is_refused(written: str, message: str) -> None:
    with pytest.raises(InputError, match=r"training\.recompute: ") as refused:
        memcalc.load("gpt2", f"recompute={written}")
    assert message in str(refused.value)


def test_segments_lie_on_one_stage() -> None:
    with pytest.raises(InputError, match="segments of several layers, but pipeline_parallel = 2"):
        memcalc.load("gpt2", "recompute=[0-1]", "pipeline_parallel=2")


def test_segments_have_no_engine_around_them() -> None:
    with pytest.raises(InputError, match="engine = fsdp2 has per-layer buffers"):
        memcalc.estimate("gpt2", "recompute=[0-1]", "data_parallel=2", "zero_stage=3")


def test_words_for_plans() -> None:
    assert words("every-2") == "every-2"
    assert words((3,)) == "1 layer"
    assert words(((0, 1), (2, 3))) == "4 layers in 2 segments"
    assert "recompute 4 layers in 2 segments" in subject(memcalc.estimate("gpt2", "recompute=[0-1, 2-3]")).how


items = st.recursive(st.just(None), lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=9)


@given(st.lists(items, min_size=1, max_size=4))
def test_a_plan_is_written_as_it_is_read(shape: list[Any]) -> None:
    """Any plan of blocks 2, 3, ...: as `training.recompute`, and back."""
    numbers = iter(range(2, 100))

    def numbered(item: Any) -> Any:
        return next(numbers) if item is None else tuple(numbered(inner) for inner in item)

    plan = tuple(numbered(item) for item in shape)
    stop = next(numbers)
    written = as_recompute((0, 1, *plan, stop), 2, stop)

    spec = memcalc.load({"preset": "gpt2", "model": {"num_layers": stop - 2}, "training": {"recompute": written}})
    recompute = spec.training.recompute
    again = recompute if not isinstance(recompute, str) else tuple(range(stop - 2)) if recompute == "full" else ()

    def shifted(item: Any) -> Any:
        return item - 2 if isinstance(item, int) else tuple(shifted(inner) for inner in item)

    assert items_of(again, stop - 2) == shifted(plan)
