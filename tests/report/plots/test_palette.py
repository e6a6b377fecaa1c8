"""The colors of the components: one each, and to be told apart by everybody."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from memcalc.ledger.component import Component
from memcalc.report.plots.palette import color, mark, name

ALL = (*Component, None)

Triple = tuple[float, float, float]

# How the three kinds of color blindness see, on linear RGB, at full severity.
# Source: Machado, Oliveira and Fernandes 2009, "A Physiologically-based Model for Simulation of Color Vision
# Deficiency", table 1.
VISIONS: dict[str, tuple[Triple, Triple, Triple]] = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
NOTICED = 10.0  # of CIE 1976's distance; 2.3 is the least that anybody sees


def linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else float(((channel + 0.055) / 1.055) ** 2.4)


def lab(rgb: Triple) -> Triple:
    """CIELAB of a linear sRGB color under D65."""
    red, green, blue = (min(max(value, 0.0), 1.0) for value in rgb)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883

    def f(t: float) -> float:
        return t ** (1 / 3) if t > (6 / 29) ** 3 else t / (3 * (6 / 29) ** 2) + 4 / 29

    return 116 * f(y) - 16, 500 * (f(x) - f(y)), 200 * (f(y) - f(z))


def seen(component: Component | None, vision: str) -> Triple:
    code = color(component)
    rgb = [linear(int(code[at : at + 2], 16) / 255) for at in (1, 3, 5)]
    red, green, blue = (sum(weight * value for weight, value in zip(row, rgb, strict=True)) for row in VISIONS[vision])
    return lab((red, green, blue))


def distance(one: Triple, other: Triple) -> float:
    return math.dist(one, other)


@pytest.mark.parametrize("vision", VISIONS)
def test_any_two_colors_can_be_told_apart(vision: str) -> None:
    close = {
        (name(one), name(other)): round(distance(seen(one, vision), seen(other, vision)), 1)
        for one, other in combinations(ALL, 2)
        if distance(seen(one, vision), seen(other, vision)) < NOTICED
    }

    assert close == {}


def test_the_distance_is_that_of_the_standard() -> None:
    """White is at (100, 0, 0), black at the origin."""
    assert lab((1, 1, 1)) == pytest.approx((100, 0, 0), abs=0.02)
    assert lab((0, 0, 0)) == pytest.approx((0, 0, 0), abs=1e-9)


def test_every_component_has_a_color_a_name_and_a_letter() -> None:
    assert len({color(component) for component in ALL}) == len(ALL)
    assert len({mark(component) for component in ALL}) == len(ALL)
    assert name(None) == "unattributed"
    assert name(Component.OPTIMIZER_STATE) == "optimizer state"
