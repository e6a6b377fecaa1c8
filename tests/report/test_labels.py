import pytest

from memcalc.ledger.component import Component
from memcalc.report import labels


@pytest.mark.parametrize(
    ("value", "text"), [(0.7887, "0.79"), (50.48, "50"), (100.96, "101"), (4.23, "4.2"), (12_345.6, "12,346")]
)
def test_ratios_in_the_digits_that_matter(value: float, text: str) -> None:
    assert labels.ratio(value) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(174_597_734_400, "174.60 B"), (124_439_808, "124.44 M"), (999, "999"), (1_500_000_000_000, "1.50 T")],
)
def test_counts(number: int, text: str) -> None:
    assert labels.count(number) == text


@pytest.mark.parametrize(("part", "whole", "text"), [(1, 3, "33.3%"), (1, 10**6, "<0.1%"), (0, 5, "0.0%"), (1, 0, "-")])
def test_percent(part: int, whole: int, text: str) -> None:
    assert labels.percent(part, whole) == text


def test_every_component_has_its_own_letter() -> None:
    letters = [labels.letter(component) for component in Component]

    assert len(set(letters)) == len(letters)
    assert all(labels.meaning(component) for component in Component)
