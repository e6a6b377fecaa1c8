"""`memcalc check`: outcomes, exit codes and formats."""

import json
from pathlib import Path

import pytest

from memcalc.checking.check import check
from memcalc.cli.app import main
from memcalc.errors import InputError
from memcalc.report.checks import check_document, github_lines, summary

SMALL = "model: {l: 2, d: 64, h: 4, V: 100}\n"
LARGE = "preset: llama-3-70b\n"
BROKEN = "model:\n  num_layers: 2\n  hidden_size: 64\n  heads: 4\n  vocab_size: 100\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for configs, given by their relative names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    return tmp_path / "configs"


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ([SMALL], 0),
        ([SMALL, LARGE], 1),
        ([SMALL, BROKEN], 2),
        ([SMALL, LARGE, BROKEN], 2),
        ([], 2),
    ],
    ids=["fits", "too large", "broken", "broken wins over too large", "nothing to check"],
)
def test_exit_codes(files: list[str], code: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index, text in enumerate(files):
        (folder / f"{index}.yaml").write_text(text)

    assert main(["check", "configs", "--gpu", "h100-80gb"]) == code
    assert capsys.readouterr().err == ""


def test_all_are_sized_even_if_one_is_broken(folder: Path) -> None:
    for name, text in (("a", BROKEN), ("b", LARGE), ("c", SMALL)):
        (folder / f"{name}.yaml").write_text(text)
    (folder / "README.md").touch()
    report = check(["configs"], gpu="h100-80gb")

    assert [outcome.status for outcome in report.outcomes] == ["broken", "does not fit", "fits"]
    assert summary(report) == "3 configs checked: 1 fit, 1 too large, 1 broken; 1 other file skipped"


def test_no_card_and_no_budget(folder: Path) -> None:
    (folder / "a.yaml").write_text(SMALL)
    (folder / "b.yaml").write_text(f"{SMALL}hardware: {{gpu: t4}}\n")
    first, second = check(["configs"]).outcomes

    assert first.message.startswith("no card and no budget to check against. Give --gpu CARD or --budget SIZE")
    assert second.status == "fits"


def test_an_unknown_card_is_wrong_input(folder: Path) -> None:
    with pytest.raises(InputError, match="not a card"):
        check(["configs"], gpu="h9000")


def test_the_smaller_of_card_and_budget_counts(folder: Path) -> None:
    (folder / "a.yaml").write_text(SMALL)
    (outcome,) = check(["configs"], gpu="h100-80gb", budget=1024).outcomes

    assert (outcome.status, outcome.limit_bytes, outcome.limit) == ("does not fit", 1024, "the budget")
    assert outcome.basis == "device"


def test_a_budget_alone(folder: Path) -> None:
    (folder / "a.yaml").write_text(SMALL)

    assert check(["configs"], budget=2**40).exit_code == 0
    assert check(["configs"], budget=2**10).exit_code == 1


def test_github_annotations(folder: Path) -> None:
    (folder / "a,b.yaml").write_text(BROKEN)
    (folder / "large.yaml").write_text(LARGE)
    (folder / "small.yaml").write_text(SMALL)
    lines = github_lines(check(["configs"], gpu="h100-80gb"), "GiB")

    assert lines[0].startswith("::error file=configs/a%2Cb.yaml,line=4,title=memcalc%3A broken config::")
    assert lines[1].startswith("::error file=configs/large.yaml,title=memcalc%3A does not fit::needs ")
    assert lines[2].startswith("configs/small.yaml: fits, needs ")
    assert lines[3] == "3 configs checked: 1 fit, 1 too large, 1 broken"


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "large.yaml").write_text(LARGE)
    code = main(["check", "configs", "--budget", "70GiB", "--format", "json"])
    document = json.loads(capsys.readouterr().out)

    assert code == document["exit_code"] == 1
    assert document == check_document(check(["configs"], budget=70 * 2**30))
    assert document["configs"][0]["path"] == "configs/large.yaml"
