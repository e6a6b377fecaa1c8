"""Where reports are drawn."""

import io

import pytest

from memcalc.report.screen import Column, Screen, TextTable, cells, draw_grid, draw_line, wants_color


@pytest.mark.parametrize(("text", "width"), [("abc", 3), ("l(12d²+13d)", 11), ("模型", 4), ("e\u0301", 1), ("", 0)])
def test_columns_of_a_terminal(text: str, width: int) -> None:
    assert cells(text) == width


@pytest.mark.parametrize(
    ("environment", "terminal", "color"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_who_gets_color(
    environment: dict[str, str], terminal: bool, color: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)

    assert wants_color() == color


def drawn(grid: TextTable, width: int) -> list[str]:
    file = io.StringIO()
    draw_grid(Screen(file, width), grid)
    return file.getvalue().splitlines()


def test_wide_letters_keep_columns_in_line() -> None:
    rows = [("模型", "1"), ("a", "22")]

    assert drawn(TextTable("", (Column("name"), Column("n", right=True)), rows), 80) == [
        "  name   n",
        "  模型   1",
        "  a     22",
        "",
    ]


def test_a_long_cell_goes_on_below() -> None:
    rows = [("x", "one two three four")]

    assert drawn(TextTable("", (Column("a"), Column("b", wrap=True)), rows), 17) == [
        "  a  b",
        "  x  one two",
        "     three four",
        "",
    ]


def test_a_long_line_goes_on_to_the_right() -> None:
    file = io.StringIO()
    draw_line(Screen(file, 20), "one two three four five", 2)

    assert file.getvalue() == "  one two three four\n    five\n"
