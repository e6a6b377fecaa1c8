"""README is short, shows whole outputs, and its plots are those that the commands draw."""

import re
from pathlib import Path

import pytest

from tools.pictures import PICTURES, draw

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SESSIONS = re.findall(r"^```console\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
CUT = re.compile(r"\|\s*(head|tail|grep|sed|awk|cut)\b")


def test_it_has_at_most_150_lines() -> None:
    assert len(README.splitlines()) <= 150


def test_no_output_is_cut() -> None:
    assert [session for session in SESSIONS if CUT.search(session)] == []


def test_the_first_command_answers_in_30_lines() -> None:
    command, *output = SESSIONS[0].splitlines()

    assert command.startswith("$ memcalc estimate ")
    assert len(output) <= 30
    assert output[3].startswith(("FITS: ", "DOES NOT FIT: "))


def test_the_plot_is_of_the_first_command() -> None:
    name = re.findall(r"\(docs/pictures/([\w.-]+)\)", README)[0]

    assert SESSIONS[0].startswith(f"$ memcalc {PICTURES[name]}\n")


@pytest.mark.long
@pytest.mark.parametrize("name", PICTURES)
def test_plots_are_what_the_commands_draw(name: str, tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    image = pytest.importorskip("matplotlib.image")
    shown, drawn = image.imread(ROOT / "docs" / "pictures" / name), image.imread(draw(name, tmp_path))

    assert shown.shape == drawn.shape
    assert np.array_equal(shown, drawn), "stale: run `make pictures`"
