"""Margins and growths: shares and sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.checking.amount import parse_amount, parse_budget
from memcalc.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5%", 50),  # 1000 · 5 / 100
        ("2.5 %", 25),
        ("0.01%", 1),  # 0.1 bytes, rounded up
        ("100%", 1000),
        ("0", 0),
        ("0%", 0),
        ("64 bytes", 64),
        ("1048576", 1048576),
        ("1KiB", 1024),
    ],
)
def test_of_a_thousand_bytes(text: str, expected: int) -> None:
    assert parse_amount(text).of(1000) == expected


@given(st.integers(0, 10_000), st.integers(0, 2**60))
def test_a_share_is_exact_and_rounded_up(hundredths: int, whole: int) -> None:
    found = parse_amount(f"{hundredths // 100}.{hundredths % 100:02}%").of(whole)

    assert (found - 1) * 10_000 < whole * hundredths <= found * 10_000 or found == whole * hundredths == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("101%", "'101%' is more than 100%"),
        ("five", "'five' is neither a percentage nor a size. Write a percentage such as 5%, or a size such as 2GiB"),
        ("-5%", "neither a percentage nor a size"),
        ("5 percent", "neither a percentage nor a size"),
        ("", "neither a percentage nor a size"),
        (f"{'9' * 400}GiB", "neither a percentage nor a size"),
        (f"{'9' * 5000}%", "neither a percentage nor a size"),
    ],
)
def test_what_is_no_amount(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_amount(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.5GiB", 3 * 2**29),
        ("0.1GB", 100_000_000),
        ("123456789123456789.25KiB", 123_456_789_123_456_789 * 1024 + 256),  # to the byte
    ],
)
def test_a_budget_is_exact(text: str, expected: int) -> None:
    assert parse_budget(text) == expected


def test_a_budget_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(InputError, match="is not a size"):
        parse_budget(f"{'9' * 400}GiB")
