import pytest

from memcalc.report.symbols import symbol_values, with_numbers
from memcalc.spec.loading import load

GPT3 = symbol_values(load("gpt3"))


@pytest.mark.parametrize(
    ("formula", "expected", "text"),
    [
        ("2·b·s·d", 50_331_648, "2 · 1 · 2048 · 12288 = 50,331,648"),
        ("2·b·h·s²", 805_306_368, "2 · 1 · 96 · 2048² = 805,306,368"),
        ("4·(d+V)·d/t", 3_074_211_840, "4 · (12288 + 50257) · 12288 / 1 = 3,074,211,840"),
    ],
)
def test_numbers_put_in(formula: str, expected: int, text: str) -> None:
    assert with_numbers(formula, GPT3, expected) == text


@pytest.mark.parametrize(
    "formula",
    ["2·b·q", "measured", "2·b·s·d·2", "2·b·", "d/0", "", "__import__('os')", "2**999999999", "min(b, s)"],
)
def test_no_numbers_where_they_would_not_add_up(formula: str) -> None:
    assert with_numbers(formula, GPT3, 50_331_648) is None
