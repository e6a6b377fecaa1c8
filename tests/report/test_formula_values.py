import pytest

import memcalc
from memcalc.report.tables.explanation import _SYMBOL, symbol_values, with_numbers
from memcalc.spec.presets import preset_names
from tests.thinning import quick_every


@pytest.fixture(scope="module")
def gpt3() -> dict[str, int]:
    return symbol_values(memcalc.estimate("gpt3"))


@pytest.mark.parametrize(
    ("formula", "expected", "text"),
    [
        ("2·b·s·d", 50_331_648, "2 · 1 · 2048 · 12288 = 50,331,648"),
        ("2·b·h·s²", 805_306_368, "2 · 1 · 96 · 2048² = 805,306,368"),
        ("5e8·d/N", 6_144_000_000_000, "5e8 · 12288 / 1 = 6,144,000,000,000"),
        ("4·V/(d+2)", 17, "4 · 50257 / (12288 + 2) = 16.4, rounded up to 17"),
        ("4·(d+V)·d/t", 3_074_211_840, "4 · (12288 + 50257) · 12288 / 1 = 3,074,211,840"),
    ],
)
def test_numbers_put_in(formula: str, expected: int, text: str, gpt3: dict[str, int]) -> None:
    assert with_numbers(formula, gpt3, expected) == text


@pytest.mark.parametrize(
    "formula",
    ["2·b·q", "measured", "2·b·s·d·2", "2·b·", "d/0", "", "__import__('os')", "2**999999999", "min(b, s)"],
)
def test_no_numbers_where_they_would_not_add_up(formula: str, gpt3: dict[str, int]) -> None:
    assert with_numbers(formula, gpt3, 50_331_648) is None


@pytest.mark.parametrize("name", quick_every(6, preset_names()))
@pytest.mark.parametrize("overrides", [(), ("zero_stage=3", "data_parallel=8"), ("zero_stage=1", "data_parallel=3")])
def test_every_formula_of_symbols_adds_up(name: str, overrides: tuple[str, ...]) -> None:
    """What is written in known symbols gives the row's own bytes, for every preset.

    But for a tensor of a single row (the gate of a shared expert), which FSDP2 pads to N of them: no share is smaller.
    """
    result = memcalc.estimate(name, *overrides)
    values = symbol_values(result)
    for row in result.ledger.rows:
        if row.shape[:1] == (1,) and row.formula.endswith("/N"):
            continue
        if set(_SYMBOL.findall(row.formula)) <= set(values) and _SYMBOL.search(row.formula):
            assert with_numbers(row.formula, values, row.bytes // row.count), row
