"""`check --baseline`: the change of each peak, and failing on growth."""

import json
from pathlib import Path
from typing import Any

import pytest

from memcalc import check
from memcalc.cli.app import main
from memcalc.documents.check import check_document
from memcalc.errors import InputError

SMALL = "model: {l: 2, d: 64, h: 4, V: 100}\ntraining: {dtype: fp16, attention: memory-efficient}\n"


@pytest.fixture
def baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two configs and the JSON of their check."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(SMALL)
    path = tmp_path / "main.json"
    path.write_text(json.dumps(check_document(check("a.yaml", "b.yaml", gpu="t4"))))
    return path


def peak(path: str, *overrides: str) -> int:
    sizes = check(path, gpu="t4", overrides=overrides).outcomes[0].sizes
    assert sizes is not None
    assert sizes.device is not None
    return sizes.device


def test_no_change(baseline: Path) -> None:
    report = check("./a.yaml", "b.yaml", gpu="t4", baseline=baseline, max_growth="0")

    assert [outcome.growth for outcome in report.outcomes] == [(peak("a.yaml"), 0, 0), (peak("b.yaml"), 0, 0)]
    assert report.exit_code == 0
    assert report.missing == ()


def test_growth_is_reported_and_fails_where_it_may_not_be(baseline: Path) -> None:
    grown = peak("a.yaml", "b=64") - peak("a.yaml")
    assert grown > 0
    told = check("a.yaml", "b.yaml", gpu="t4", baseline=baseline, overrides=["b=64"])
    failed = check("a.yaml", "b.yaml", gpu="t4", baseline=baseline, overrides=["b=64"], max_growth="0")

    assert [outcome.growth for outcome in told.outcomes] == [(peak("a.yaml"), grown, None)] * 2
    assert (told.exit_code, failed.exit_code) == (0, 1)
    assert [outcome.status for outcome in failed.outcomes] == ["grew", "grew"]


@pytest.mark.parametrize(("slack", "code"), [(0, 0), (-1, 1)])
def test_growth_up_to_what_is_allowed(slack: int, code: int, baseline: Path) -> None:
    """Exactly what is allowed is allowed, and not a byte more."""
    grown = peak("a.yaml", "b=64") - peak("a.yaml")

    report = check("a.yaml", gpu="t4", baseline=baseline, overrides=["b=64"], max_growth=str(grown + slack))
    assert report.exit_code == code


def test_what_shrank_is_well(baseline: Path) -> None:
    report = check("a.yaml", gpu="t4", baseline=baseline, overrides=["l=1"], max_growth="0")

    assert report.outcomes[0].growth is not None
    assert report.outcomes[0].growth.difference < 0
    assert report.exit_code == 0


def test_new_and_gone(baseline: Path) -> None:
    (baseline.parent / "c.yaml").write_text(SMALL)
    report = check("b.yaml", "c.yaml", gpu="t4", baseline=baseline, max_growth="0")

    assert report.outcomes[1].growth is None
    assert report.missing == ("a.yaml",)
    assert report.exit_code == 0


def test_too_large_says_more_than_grew(baseline: Path) -> None:
    report = check("a.yaml", gpu="t4", budget="1kB", baseline=baseline, overrides=["b=64"], max_growth="0")

    assert report.outcomes[0].status == "does not fit"
    assert report.outcomes[0].growth is not None


def test_a_broken_one_has_no_change(baseline: Path) -> None:
    (baseline.parent / "a.yaml").write_text("model: {")
    report = check("a.yaml", "b.yaml", gpu="t4", baseline=baseline)

    assert [outcome.growth is None for outcome in report.outcomes] == [True, False]
    assert report.exit_code == 2


def test_judged_by_a_gpu_then_and_by_a_budget_now(baseline: Path) -> None:
    """A budget is the memory of a GPU; its context is that of an A100, so device memory may differ by its size."""
    (outcome,) = check("a.yaml", budget="2GiB", baseline=baseline).outcomes
    stored = json.loads(baseline.read_text())["configs"][0]

    assert outcome.growth is not None
    assert outcome.basis == "device"
    assert outcome.growth.baseline == stored["device_bytes"]


def test_a_baseline_of_the_settings(baseline: Path) -> None:
    settings = 'gpu = "t4"\nbaseline = "main.json"\nmax_growth = "0"\n[[rules]]\npaths = ["b.yaml"]\nmax_growth="90%"'
    (baseline.parent / "memcalc.toml").write_text(settings)
    report = check("a.yaml", "b.yaml", overrides=["b=32"])  # more by several segments

    assert [outcome.status for outcome in report.outcomes] == ["grew", "fits"]


def test_growth_of_nothing_is_refused(baseline: Path) -> None:
    with pytest.raises(InputError, match=r"--max-growth needs a baseline. Add --baseline FILE"):
        check("a.yaml", gpu="t4", max_growth="0")


WRONG: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "this is not JSON: "),
    "no report": ([], "the file has no list of configs"),
    "another version": ({"schema_version": 9, "configs": []}, "schema_version = 9 is not 2"),
    "no path": ({"schema_version": 1, "configs": [{}]}, r"configs\[0\] has no path"),
    "no number": (
        {"schema_version": 2, "configs": [{"path": "a", "device_bytes": "7"}]},
        r"configs\[0\].device_bytes is not a whole number",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_baselines(case: str, baseline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, message = WRONG[case]
    baseline.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(
        InputError, match=f"^--baseline: .*main.json: {message}.*the output of `memcalc check ... --format json`"
    ):
        check("a.yaml", gpu="t4", baseline=baseline)

    assert main(["check", "a.yaml", "--gpu", "t4", "--baseline", "absent.json"]) == 2
    assert "absent.json: the file cannot be read: No such file" in capsys.readouterr().err
