"""Errors: one line in a log, wrapped and colored at a terminal."""

import pytest

from memcalc.cli.messages import show_error

TEXT = "gpt3.yaml:4: model.num_layers: num_layers = 0 is not positive. Give the number of layers, for instance 96."


def test_one_line_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(TEXT)

    assert capsys.readouterr().err == f"error: {TEXT}\n"


@pytest.mark.parametrize("color", [True, False])
def test_wrapped_at_a_terminal(
    color: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not color:
        monkeypatch.setenv("NO_COLOR", "1")
    show_error(TEXT)
    err = capsys.readouterr().err

    assert err.replace("\x1b[31m\x1b[1m", "").replace("\x1b[0m", "") == (
        "error: gpt3.yaml:4: model.num_layers: num_layers = 0 is not\n"
        "  positive. Give the number of layers, for instance 96.\n"
    )
    assert ("\x1b" in err) == color
