"""Whole screens of `fit`, and their sums."""

import io
from collections.abc import Callable

import pytest

from memcalc.report.screen import Screen
from memcalc.report.screens.fit import draw_fit
from tests.report.fits import CASES, answer

Golden = Callable[[str, str], None]

SCREENS = [
    pytest.param(name, marks=pytest.mark.long if name in {"experts", "cost"} else ())
    for name in CASES
    if name not in {"changes", "batch", "none_at_a_price"}
]


def screen(name: str, width: int, *, why: bool = False) -> str:
    file = io.StringIO()
    draw_fit(Screen(file, width), answer(name), "GiB", why=why)
    return file.getvalue()


@pytest.mark.parametrize("name", SCREENS)
def test_screens(name: str, golden: Golden) -> None:
    text = screen(name, 100)

    golden(f"fit_{name}_100", text)
    assert max(map(len, text.splitlines())) <= 100


def test_a_narrow_screen_with_reasons(golden: Golden) -> None:
    golden("fit_layouts_80", screen("layouts", 80, why=True))


def test_the_seconds_of_a_layout_add_up() -> None:
    lines = screen("layouts", 100).splitlines()
    start = lines.index("Seconds of a step at peak rates") + 2

    for line in lines[start : start + 3]:
        *terms, total = map(float, line.split()[1:])
        assert sum(terms) == pytest.approx(total, abs=0.0005 * (len(terms) + 1))
