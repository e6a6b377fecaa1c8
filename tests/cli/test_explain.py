"""--explain with and without a word."""

from pathlib import Path

import pytest

from memcalc.cli.estimate import fill_in_explain


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("gpt3 --explain", "gpt3 --explain all"),
        ("--explain gpt3", "--explain all gpt3"),
        ("--explain ./a.yaml", "--explain all ./a.yaml"),
        ("gpt3 --explain --format json", "gpt3 --explain all --format json"),
        ("gpt3 --explain weights", "gpt3 --explain weights"),
        ("gpt3 --explain optimizer-state -f csv", "gpt3 --explain optimizer-state -f csv"),
        ("gpt3 --explain parameters", "gpt3 --explain parameters"),
        ("gpt3 --explain=weights", "gpt3 --explain=weights"),
        ("gpt3 --explain wieghts", "gpt3 --explain wieghts"),
        ("-- --explain", "-- --explain"),
    ],
)
def test_fill_in(typed: str, meant: str) -> None:
    assert fill_in_explain(typed.split()) == meant.split()


def test_a_file_that_exists_is_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").touch()
    monkeypatch.chdir(tmp_path)

    assert fill_in_explain(["--explain", "mine"]) == ["--explain", "all", "mine"]
