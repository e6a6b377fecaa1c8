"""Measured ranks on the screen: one sentence where they are identical, each where they are not."""

import io
from dataclasses import replace

from memcalc.ledger.result import DeviceMemory, OutsideMemory, Result, known
from memcalc.report.screen import Screen
from memcalc.report.screens.measurement import draw_ranks


def drawn(ranks: list[Result]) -> list[str]:
    file = io.StringIO()
    draw_ranks(Screen(file, 80), ranks, "GiB")
    return file.getvalue().splitlines()


def with_reserve(result: Result, gib: int) -> Result:
    memory = DeviceMemory(gib * 2**30, None, OutsideMemory(0, 0, 0))
    return replace(result, device=f"cuda:{gib}", ranks=(replace(result.headline, memory=known(memory)),))


def test_ranks_that_are_alike(result: Result) -> None:
    assert drawn([result, result]) == ["All 2 ranks used the same memory."]


def test_ranks_that_differ(result: Result) -> None:
    """In one figure, of one rank: all are shown."""
    lines = drawn([with_reserve(result, 12), with_reserve(result, 12), with_reserve(result, 13)])

    cells = [line.split() for line in lines]
    assert lines[0] == "Ranks"
    assert [(row[0], row[1], row[3]) for row in cells[2:5]] == [
        ("0", "cuda:12", "12.00"),
        ("1", "cuda:12", "12.00"),
        ("2", "cuda:13", "13.00"),
    ]
