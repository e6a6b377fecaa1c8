"""`memcalc check`: outcomes, exit codes and formats."""

import json
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc import Result, Spec, check, estimate
from memcalc.checking import check as check_module
from memcalc.cli.app import main
from memcalc.documents.check import check_document
from memcalc.errors import InputError
from memcalc.importers.loading import load
from memcalc.report.checks.formats import github_lines
from memcalc.report.checks.text import summary
from memcalc.units import exact_size
from memcalc.verdict.judge import size_against

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
    errors = capsys.readouterr().err.splitlines()
    broken = [index for index, text in enumerate(files) if text == BROKEN]
    if files:
        assert [error.partition(":")[2].split(":")[0] for error in errors] == [f" configs/{i}.yaml" for i in broken]
    else:
        assert errors == [
            (
                "error: no configuration found: nothing was checked. "
                "Name a configuration file (a named file is always checked) or another directory."
            )
        ]


def test_all_are_sized_even_if_one_is_broken(folder: Path) -> None:
    for name, text in (("a", BROKEN), ("b", LARGE), ("c", SMALL)):
        (folder / f"{name}.yaml").write_text(text)
    (folder / "README.md").touch()
    report = check("configs", gpu="h100-80gb")

    assert [outcome.status for outcome in report.outcomes] == ["broken", "does not fit", "fits"]
    assert summary(report) == "3 configs checked: 1 fit, 1 too large, 1 invalid; 1 other file skipped"


def test_no_gpu_and_no_budget(folder: Path) -> None:
    (folder / "a.yaml").write_text(SMALL)
    (folder / "b.yaml").write_text(f"{SMALL}hardware: {{gpu: t4}}\n")
    first, second = check("configs").outcomes

    assert first.message.startswith("no GPU and no budget to check against. Add --gpu GPU or --budget SIZE")
    assert second.status == "fits"


def test_no_settings_and_no_path(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--gpu", "t4"]) == 2
    assert capsys.readouterr().err == (
        "error: nothing to check: no path is given. Name files or directories, or add `paths = [...]` to "
        "memcalc.toml.\n"
    )


def test_overrides_go_to_all(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / f"{name}.yaml").write_text(SMALL)
    report = check("configs", gpu="t4", overrides=["b=3", "name=x"])
    expected = estimate(folder / "a.yaml", "b=3", gpu="t4").headline.device_bytes

    assert [outcome.needed_bytes for outcome in report.outcomes] == [expected, expected]


def test_an_override_that_is_no_field_is_wrong_input(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.yaml").write_text(SMALL)

    assert main(["check", "configs", "--gpu", "t4", "--set", "layer=3"]) == 2
    assert capsys.readouterr().err.startswith("error: --set layer=3: ")


def test_an_override_that_one_config_cannot_take_breaks_that_one(folder: Path) -> None:
    (folder / "a.yaml").write_text(SMALL)
    (folder / "b.yaml").write_text(SMALL.replace("h: 4", "h: 1"))
    report = check("configs", gpu="l4", overrides=["tensor_parallel=2"])

    assert [outcome.status for outcome in report.outcomes] == ["fits", "broken"]
    assert "tensor_parallel = 2" in report.outcomes[1].message


def test_what_is_no_yaml_does_not_pass_and_templates_of_other_things_are_others(folder: Path) -> None:
    for name, text in {
        "a.yaml": SMALL,
        "cut.yaml": "run: {steps: [\n",
        "helm.yaml": "{{- if .Values.on }}\nkind: Pod\n{{- end }}\n",
        "jinja.yaml": "model:\n  {% if large %}\n  l: 2\n",
    }.items():
        (folder / name).write_text(text)
    report = check("configs", gpu="t4")

    assert [(each.path, each.status) for each in report.outcomes] == [
        ("configs/a.yaml", "fits"),
        ("configs/cut.yaml", "broken"),
        ("configs/jinja.yaml", "broken"),
    ]
    assert (report.exit_code, report.skipped) == (2, 1)
    assert report.outcomes[1].message.startswith("this is not YAML: did not find expected node content. Check ")
    assert report.outcomes[2].message == (
        "this is not YAML: found character that cannot start any token. Render the template first, and name the result."
    )
    assert check("configs/cut.yaml", "configs/helm.yaml", gpu="t4", skip_others=True).count("broken") == 1


def test_patterns(folder: Path) -> None:
    (folder / "deep").mkdir()
    for name in ("a.yaml", "b.yml", "deep/c.yaml", "deep/note.md"):
        (folder / name).write_text(SMALL)

    assert [outcome.path for outcome in check("configs/**/*.yaml", gpu="t4").outcomes] == [
        "configs/a.yaml",
        "configs/deep/c.yaml",
    ]
    assert [outcome.path for outcome in check("configs/d*", gpu="t4").outcomes] == ["configs/deep/c.yaml"]


def test_a_pattern_without_a_match_is_broken(folder: Path) -> None:
    (folder / "a.yaml").write_text(SMALL)
    report = check("configs", "runs/*.yaml", gpu="t4")

    assert report.exit_code == 2
    assert report.outcomes[1].message == "no file matches this pattern. Correct or remove it."


def test_skipping_what_is_no_config(folder: Path) -> None:
    """As a hook needs it that is given the names of all files that changed."""
    (folder / "a.yaml").write_text(SMALL)
    (folder / "ci.yml").write_text("on: push\n")
    (folder / "bad.yaml").write_text(BROKEN)

    assert check("configs/a.yaml", "configs/ci.yml", gpu="t4").exit_code == 2
    report = check("configs/a.yaml", "configs/ci.yml", gpu="t4", skip_others=True)
    assert (report.exit_code, report.skipped, len(report.outcomes)) == (0, 1, 1)
    assert check("configs/ci.yml", gpu="t4", skip_others=True).exit_code == 0
    assert check("configs/bad.yaml", "absent.yaml", gpu="t4", skip_others=True).count("broken") == 2


@pytest.mark.parametrize("jobs", [1, 2, 7])
def test_processes_change_nothing(jobs: int, folder: Path) -> None:
    for index in range(5):
        (folder / f"{index}.yaml").write_text([SMALL, LARGE, BROKEN][index % 3])

    assert check("configs", gpu="h100-80gb", jobs=jobs) == check("configs", gpu="h100-80gb")


def test_a_bug_in_one_file_does_not_hide_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.yaml").write_text(SMALL)
    (folder / "b.yaml").write_text(SMALL.replace("l: 2", "l: 3"))

    def failing(spec: Spec, limit: int) -> Result:
        if spec.model.num_layers == 2:
            raise ZeroDivisionError("no such\nthing")
        return size_against(spec, limit)

    monkeypatch.setattr(check_module, "size_against", failing)
    report = check("configs", gpu="t4")

    assert [outcome.status for outcome in report.outcomes] == ["broken", "fits"]
    assert report.outcomes[0].message == (
        "a bug of memcalc: ZeroDivisionError: no such thing. Please report it with the file."
    )


@pytest.mark.parametrize(("extra", "code"), [(0, 0), (1, 1)])
def test_a_margin_to_the_byte(extra: int, code: int, folder: Path) -> None:
    """The interval's upper end and the margin fill the budget: it fits; one byte more of margin, and it may not."""
    (folder / "a.yaml").write_text(SMALL)
    interval = check("configs", budget="1TiB").outcomes[0].interval
    assert interval is not None

    assert check("configs", budget=interval[1] + 1000, margin=f"{1000 + extra} bytes").exit_code == code


def test_reports_beside_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.yaml").write_text(SMALL)
    line = ["check", "configs", "--gpu", "t4", "--report", "junit=out.xml", "--report", "sarif=out.sarif"]

    assert main(line) == 0
    assert "1 config checked: 1 fit" in capsys.readouterr().out
    assert Path("out.xml").read_text().startswith('<?xml version="1.0" encoding="UTF-8"?>\n<testsuites ')
    assert json.loads(Path("out.sarif").read_text())["version"] == "2.1.0"


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (
            "pdf=x",
            (
                "--report pdf=x: 'pdf' is not a format. Write FORMAT=FILE, e.g. --report junit=memcalc.xml; formats "
                "are "
                "json, "
            ),
        ),
        ("junit", "--report junit: the file is missing. Write FORMAT=FILE,"),
    ],
)
def test_reports_of_no_known_format(
    report: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.yaml").write_text(SMALL)

    assert main(["check", "configs", "--gpu", "t4", "--report", report]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_report_that_cannot_be_written_costs_no_result(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.yaml").write_text(SMALL)

    assert main(["check", "configs", "--gpu", "t4", "--report", "junit=no/such/folder.xml"]) == 3
    shown = capsys.readouterr()
    assert "1 config checked: 1 fit" in shown.out
    assert shown.err.startswith("error: no/such/folder.xml could not be written: No such file or directory.")


def test_an_unknown_gpu_is_wrong_input(folder: Path) -> None:
    with pytest.raises(InputError, match="not a known GPU"):
        check("configs", gpu="h9000")


def test_the_smaller_of_gpu_and_budget_counts(folder: Path) -> None:
    (folder / "a.yaml").write_text(SMALL)
    (outcome,) = check("configs", gpu="h100-80gb", budget=1024).outcomes

    assert (outcome.status, outcome.limit_bytes, outcome.limit) == ("does not fit", 1024, "the budget")
    assert outcome.basis == "device"


def test_a_budget_alone(folder: Path) -> None:
    (folder / "a.yaml").write_text(SMALL)

    assert check("configs", budget=2**40).exit_code == 0
    assert check("configs", budget=2**10).exit_code == 1


@pytest.mark.parametrize(
    ("size", "text"), [(24 * 2**30, "24GiB"), (47_100 * 2**20, "47100MiB"), (2**40, "1TiB"), (1000, "1000B")]
)
def test_a_budget_has_the_largest_unit_that_divides_it(size: int, text: str) -> None:
    assert exact_size(size) == text


def test_a_budget_includes_the_context_as_in_estimate(folder: Path) -> None:
    """The run's reserved memory alone would fit the second budget."""
    (folder / "a.yaml").write_text(SMALL)
    need = memcalc.estimate(folder / "a.yaml", "hardware.budget=1TiB")
    assert need.interval is not None
    assert need.headline.reserved_bytes is not None

    for budget, status in ((need.interval.high_bytes, "fits"), (need.headline.reserved_bytes, "does not fit")):
        verdict = memcalc.estimate(folder / "a.yaml", f"hardware.budget={budget}B").verdict
        (outcome,) = check("configs", budget=budget).outcomes
        assert outcome.status == status == str(verdict).replace("-", " ")


def test_github_annotations(folder: Path) -> None:
    (folder / "a,b.yaml").write_text(BROKEN)
    (folder / "large.yaml").write_text(LARGE)
    (folder / "small.yaml").write_text(SMALL)
    lines = github_lines(check("configs", gpu="h100-80gb"), "GiB")

    assert lines[0].startswith("::error file=configs/a%2Cb.yaml,line=4,title=memcalc%3A invalid config::")
    assert lines[1].startswith("::error file=configs/large.yaml,title=memcalc%3A does not fit::needs ")
    assert lines[2].startswith("fits: configs/small.yaml: needs ")
    assert lines[3] == "3 configs checked: 1 fit, 1 too large, 1 invalid"


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "large.yaml").write_text(LARGE)
    code = main(["check", "configs", "--budget", "70GiB", "--format", "json"])
    document = json.loads(capsys.readouterr().out)

    assert code == document["exit_code"] == 1
    assert document == check_document(check("configs", budget=70 * 2**30))
    assert document["configs"][0]["path"] == "configs/large.yaml"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--budget=70 Gigs", "--budget: '70 Gigs' is not a size."),
        ("--budget=70", "--budget: '70' has no unit. Write one, such as 70GiB (2^30 bytes)."),
        ("--margin=5", "--margin: '5' has no unit. Write one: 5% or 5GiB."),
        ("--margin=abc", "--margin: 'abc' is neither a percentage nor a size. Write a percentage such as 5%"),
        ("--max-growth=200%", "--max-growth: '200%' is more than 100%."),
    ],
)
def test_wrong_amounts_name_their_option(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "gpt2", "--gpu", "t4", option]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


AXOLOTL = """\
base_model: meta-llama/Llama-3.2-1B
sequence_len: 512
micro_batch_size: 1
bf16: true
flash_attention: true
a_field_of_tomorrow: 3
"""


def test_how_another_frameworks_file_was_read_is_said_in_every_format(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.yaml").write_text(AXOLOTL)
    words = "unknown, so not counted: a_field_of_tomorrow"

    for form in ("table", "markdown", "json", "github", "junit", "sarif"):
        assert main(["check", "configs", "--gpu", "h100-80gb", "--set", "data_parallel=1", "--format", form]) == 0
        assert words in " ".join(capsys.readouterr().out.replace("\\_", "_").split()), form


def test_settings_that_match_nothing_are_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo would give another limit; where files are named, as hooks do, it is no matter."""
    (folder / "run.yaml").write_text(SMALL)
    text = 'paths = ["configs"]\ngpu = "t4"\n[[rules]]\npaths = ["config/**"]\nbudget = "1GiB"\n'
    (folder.parent / "memcalc.toml").write_text(text)

    main(["check"])
    assert "config/** in the settings matches no configuration" in capsys.readouterr().out
    main(["check", "configs/run.yaml"])
    assert "matches no configuration" not in capsys.readouterr().out


def test_a_baseline_of_other_configurations_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.yaml").write_text(SMALL)
    main(["check", "configs", "--gpu", "t4", "--format", "json"])
    (folder.parent / "main.json").write_text(capsys.readouterr().out)
    (folder / "run.yaml").rename(folder / "other.yaml")

    main(["check", "configs", "--gpu", "t4", "--baseline", "main.json", "--max-growth", "0"])
    assert "nothing was compared" in " ".join(capsys.readouterr().out.split())


def test_names_cannot_steer_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a\x1b[31m.yaml").write_text(SMALL)

    for form in ("table", "markdown"):
        main(["check", "configs", "--gpu", "t4", "--format", form])
        assert "\x1b" not in capsys.readouterr().out


def test_descriptions_are_made_in_the_same_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each configuration is read once; a description has device memory though a bound decided that it does not fit."""
    for name, text in (("a", BROKEN), ("b", LARGE), ("c", SMALL)):
        (folder / f"{name}.yaml").write_text(text)
    loaded: list[str] = []

    def counted(path: str, *options: Any, **more: Any) -> Spec:
        loaded.append(Path(path).name)
        return load(path, *options, **more)

    monkeypatch.setattr(check_module, "load", counted)
    report = check("configs", gpu="h100-80gb", describe=lambda result: result.headline.device_bytes)

    assert sorted(loaded) == ["a.yaml", "b.yaml", "c.yaml"]
    broken, large, small = report.outcomes
    assert large.sizes is not None
    assert small.sizes is not None
    assert broken.description is None
    assert large.sizes.device is None
    assert large.description > 80e9
    assert small.description == small.sizes.device
    plain = check("configs", gpu="h100-80gb").outcomes
    assert [each._replace(description=None) for each in report.outcomes] == [*plain]


def test_of_many_configs_the_most_urgent_are_described(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "MOST_DESCRIBED", 2)
    for name, text in (("a", SMALL), ("b", LARGE), ("c", "preset: gpt2\n"), ("d", BROKEN)):
        (folder / f"{name}.yaml").write_text(text)
    report = check("configs", gpu="h100-80gb", describe=lambda result: result.spec.name)
    assert [bool(outcome.description) for outcome in report.outcomes] == [False, True, True, False]
