"""Whole screens of `fit`, and their sums."""

import io
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

import memcalc
from memcalc.report.screen import Screen
from memcalc.report.screens.fit import draw_fit
from memcalc.search.result import FitResult

Golden = Callable[[str, str], None]

CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "layouts": ("llama-3-8b", ("s=8192", "recipe=mixed-16"), {"gpu": "h100-80gb", "gpus": 16, "top": 3}),
    "one_card": ("gpt2", ("recipe=amp",), {"gpu": "rtx-4090"}),
    "nothing": ("llama-3-8b", (), {"gpu": "t4"}),
    "experts": ("granite-3.0-1b-a400m", ("recipe=mixed-16",), {"gpu": "l40s", "gpus": 4, "top": 2}),
    "cost": (
        "llama-3-8b",
        ("recipe=mixed-16",),
        {"minimize": "cost", "top": 1, "prices": {"a100-40gb": 1.0, "t4": 0.2, "h100-80gb": 2.1}, "gpus": 16},
    ),
    "fewest": ("llama-3-8b", ("recipe=mixed-16",), {"gpu": "a100-40gb", "minimize": "gpus", "top": 1}),
    "smallest_card": ("llama-3.2-1b", (), {"gpu": "t4", "minimize": "gpu_kind"}),
    "recompute": ("llama-3.2-1b", ("recipe=pure", "b=4", "loss=chunked"), {"gpu": "t4", "minimize": "recompute"}),
    "not_even_full": ("llama-3.2-1b", ("recipe=mixed-16",), {"gpu": "t4", "minimize": "recompute"}),
    "parameters": ("gpt2", ("recipe=amp",), {"gpu": "rtx-4090", "maximize": "parameters"}),
}


@cache
def answer(name: str) -> FitResult:
    source, overrides, options = CASES[name]
    return memcalc.fit(source, *overrides, **options)


def screen(name: str, width: int, *, why: bool = False) -> str:
    file = io.StringIO()
    draw_fit(Screen(file, width), answer(name), "GiB", why=why)
    return file.getvalue()


@pytest.mark.parametrize("name", CASES)
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
