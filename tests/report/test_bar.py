import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.report.screen import letter_bar, small_bar


def test_letters_are_as_long_as_their_share() -> None:
    assert letter_bar([("W", 50), ("G", 25), ("A", 25)], 8) == "WWWWGGAA"


def test_what_is_small_still_shows() -> None:
    assert letter_bar([("W", 10**12), ("I", 1)], 10) == "WWWWWWWWWI"


def test_nothing_has_no_bar() -> None:
    assert letter_bar([], 10) == letter_bar([("W", 0)], 10) == ""


@given(st.lists(st.integers(0, 2**50), min_size=1, max_size=14), st.integers(1, 120))
def test_the_bar_fills_its_width(sizes: list[int], width: int) -> None:
    bar = letter_bar([(chr(ord("A") + i), size) for i, size in enumerate(sizes)], width)

    assert len(bar) == (width if any(sizes) else 0)
    assert bar == "".join(sorted(bar))


@pytest.mark.parametrize(("size", "bar"), [(0, ""), (5, "##"), (10, "####")])
def test_small_bars(size: int, bar: str) -> None:
    assert small_bar(size, 10, 4) == bar
