"""`memcalc.toml` and `[tool.memcalc]`: files, limits and rules of `memcalc check`, and messages for invalid files."""

from pathlib import Path

import pytest

import memcalc
from memcalc import check
from memcalc.cli.app import main
from memcalc.errors import InputError

SMALL = "model: {l: 2, d: 64, h: 4, V: 100}\n"
SETTINGS = """\
paths = ["configs"]
exclude = ["**/draft-*"]
gpu = "h100-80gb"
margin = "5%"

[[rules]]
paths = ["configs/large/**", "configs/wide.yaml"]
gpu = "t4"
set = ["b=2"]

[[rules]]
paths = ["configs/large/last.yaml"]
budget = "1GiB"
margin = "0"
set = ["b=3"]
"""
PROJECT = """\
[project]
name = "runs"
[tool.memcalc]
paths = ["configs"]
budget = "2GiB"
[[tool.memcalc.rules]]
paths = ["configs/wide.yaml"]
budget = "3GiB"
"""
FILES = ("small.yaml", "wide.yaml", "draft-1.yaml", "large/first.yaml", "large/last.yaml")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with configs, without settings."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "configs" / "large").mkdir(parents=True)
    for name in FILES:
        (tmp_path / "configs" / name).write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_rules_by_path(repository: Path) -> None:
    """The last rule that matches wins, field by field; overrides add up."""
    (repository / "memcalc.toml").write_text(SETTINGS)
    found = {outcome.path: outcome for outcome in check().outcomes}

    assert list(found) == [f"configs/{name}" for name in ("small.yaml", "wide.yaml", *FILES[3:])]
    gpus = {path: outcome.sizes.gpu for path, outcome in found.items() if outcome.sizes}
    assert gpus["configs/small.yaml"] == "h100-80gb"
    assert gpus["configs/wide.yaml"] == gpus["configs/large/last.yaml"] == "t4"
    last = found["configs/large/last.yaml"]
    assert (last.limit_bytes, last.margin_bytes) == (2**30, 0)
    for name, overrides in (("large/first.yaml", ["b=2"]), ("large/last.yaml", ["b=2", "b=3"])):
        path = f"configs/{name}"
        assert found[path].sizes.allocated == memcalc.estimate(path, *overrides, gpu="t4").replayed.ledger.peak_bytes  # type: ignore[union-attr]


def test_the_margin_is_kept_free(repository: Path) -> None:
    (repository / "memcalc.toml").write_text('budget = 1000000000\nmargin = "5%"\n')
    (outcome,) = check("configs/small.yaml").outcomes

    assert (outcome.margin_bytes, outcome.limit_bytes) == (50_000_000, 950_000_000)


def test_the_command_line_overrides_the_settings(repository: Path) -> None:
    (repository / "memcalc.toml").write_text(SETTINGS)
    (outcome,) = check("configs/large/last.yaml", gpu="h200", budget="2GiB", overrides=["b=5"]).outcomes

    assert outcome.sizes is not None
    assert outcome.sizes.gpu == "h200"
    assert outcome.limit_bytes == 2**31
    assert outcome.sizes.allocated == check("configs/small.yaml", overrides=["b=5"]).outcomes[0].sizes.allocated  # type: ignore[union-attr]


def test_a_gpu_that_is_set_as_a_field(repository: Path) -> None:
    """It is the GPU to judge by, level by level: a rule's over that of the rest, and the command line's over both."""
    settings = SETTINGS.replace('gpu = "t4"\nset = ["b=2"]', 'set = ["gpu=t4", "b=2"]')
    (repository / "memcalc.toml").write_text(settings)

    for overrides, cards in (([], {"h100-80gb", "t4"}), (["hardware.gpu=h200"], {"h200"})):
        assert {outcome.sizes.gpu for outcome in check(overrides=overrides).outcomes if outcome.sizes} == cards
    (repository / "memcalc.toml").write_text(settings.replace("set = [", 'gpu = "l4"\nset = ['))
    with pytest.raises(InputError, match=r"rules\[0\]: set: gpu is set twice"):
        check()


def test_settings_of_a_project(repository: Path) -> None:
    (repository / "pyproject.toml").write_text(PROJECT)
    limits = {outcome.path: outcome.limit_bytes for outcome in check().outcomes}

    assert limits["configs/small.yaml"] == 2 * 2**30
    assert limits["configs/wide.yaml"] == 3 * 2**30


def test_memcalc_toml_goes_before_pyproject(repository: Path) -> None:
    (repository / "pyproject.toml").write_text(PROJECT)
    (repository / "memcalc.toml").write_text('budget = "5GiB"\n')

    assert check("configs/wide.yaml").outcomes[0].limit_bytes == 5 * 2**30


def test_a_project_that_does_not_use_it(repository: Path) -> None:
    (repository / "pyproject.toml").write_text('[project]\ndependencies = ["llm-memcalc"]\n')

    assert check("configs/small.yaml", budget="1GiB").exit_code == 0


def test_from_a_directory_below(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are found above; their paths stay theirs, and are shown as seen from here."""
    (repository / "memcalc.toml").write_text(SETTINGS)
    monkeypatch.chdir(repository / "configs" / "large")
    found = {outcome.path: outcome.sizes.gpu for outcome in check().outcomes if outcome.sizes}

    assert found == {
        "../small.yaml": "h100-80gb",
        "../wide.yaml": "t4",
        "../large/first.yaml": "t4",
        "../large/last.yaml": "t4",
    }


def test_settings_are_looked_for_up_to_the_root_of_the_repository(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "memcalc.toml").write_text("no settings at all")
    inner = repository / "inner"
    (inner / ".git").mkdir(parents=True)
    (inner / "run.yaml").write_text(SMALL)
    monkeypatch.chdir(inner)

    assert check("run.yaml", budget="1GiB").exit_code == 0


def test_settings_that_are_named(repository: Path) -> None:
    (repository / "memcalc.toml").write_text("not this one")
    (repository / "strict.toml").write_text('budget = "1kB"\n')

    assert check("configs/small.yaml", settings="strict.toml").exit_code == 1


WRONG = {
    "budgets = 1": "memcalc.toml: budgets: unknown setting budgets. Did you mean budget?",
    "zzz = 1": "memcalc.toml: zzz: unknown setting zzz. Choose from gpu, budget, margin, max_growth, set, paths,",
    'gpu = "h9000"': "memcalc.toml: gpu: 'h9000' is not a known GPU.",
    "budget = 70": "memcalc.toml: budget: '70' has no unit. Write one, such as 70GiB",
    'budget = "70 Gigs"': "memcalc.toml: budget: '70 Gigs' is not a size. Write a number and a unit",
    'margin = "x"': "memcalc.toml: margin: 'x' is neither a percentage nor a size.",
    "margin = [1]": "memcalc.toml: margin: margin = a list is not a string.",
    'paths = "configs"': "memcalc.toml: paths: paths = 'configs' is not a list. Write a list of strings, such as [\"con",
    "paths = [1]": "memcalc.toml: paths[0]: 0 = 1 is not a string. Write it in quotation marks.",
    "jobs = 0": "memcalc.toml: jobs: jobs = 0 is too small. Write at least 1.",
    'set = ["layers"]': "memcalc.toml: set: the '=' is missing. Write --set field=value",
    "[[rules]]\ngpu='t4'": "memcalc.toml: rules[0].paths: paths is missing. A rule needs the paths that it applies to.",
    "[[rules]]\npaths=[]": "memcalc.toml: rules[0].paths: paths = a list is empty.",
    "[[rules]]\npaths=['a']\n[[rules]]\npaths=['b']\nmargin='x'": "memcalc.toml: rules[1]: margin: 'x' is neither",
    "[[rules]]\npaths=['a']\njobs=1": "memcalc.toml: rules[0].jobs: unknown setting jobs. Choose from gpu, budget",
    "rules = [1]": "memcalc.toml: rules[0]: ",
    "paths = [": "memcalc.toml: this is not TOML in UTF-8: ",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_settings(text: str, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One message with the place, the value, the rule and the way out; exit code 2."""
    (repository / "memcalc.toml").write_text(text)

    assert main(["check", "configs", "--gpu", "t4"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {WRONG[text]}")
    assert error.count("\n") == 1


def test_wrong_settings_of_a_project(repository: Path) -> None:
    (repository / "pyproject.toml").write_text('[tool.memcalc]\ngpu = "x9"\n')
    with pytest.raises(InputError, match=r"^pyproject.toml: tool.memcalc: gpu: 'x9' is not a known GPU"):
        check("configs")
    (repository / "pyproject.toml").write_text("[tool]\nmemcalc = 3\n")
    with pytest.raises(InputError, match=r"^pyproject.toml: tool.memcalc is 3, not a table"):
        check("configs")


def test_named_settings_that_are_missing(repository: Path) -> None:
    with pytest.raises(InputError, match=r"absent.toml: the file cannot be read: No such file or directory"):
        check("configs", settings="absent.toml")
    (repository / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(InputError, match=r"the file has no table \[tool.memcalc\]"):
        check("configs", settings="pyproject.toml")
