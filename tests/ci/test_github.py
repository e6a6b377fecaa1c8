"""The GitHub Action and the workflow that uses it: by GitHub's published schemas, and its script as a runner runs it."""

import json
import re
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
WORKFLOW = ROOT / "docs" / "examples" / "project" / ".github" / "workflows" / "memory.yml"
INPUT = re.compile(r"\$\{\{ inputs\.([\w-]+) \}\}")


def schema(name: str) -> Any:
    """A schema of SchemaStore, as check-jsonschema carries it."""
    path = files("check_jsonschema") / "builtin_schemas" / "vendor" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def read(path: Path) -> Any:
    """YAML as GitHub reads it: `on` is a word."""
    text = re.sub(r"^on:", '"on":', path.read_text(), flags=re.MULTILINE)
    return yaml.safe_load(text)


def test_the_action_is_valid() -> None:
    jsonschema.validate(ACTION, schema("github-actions"))


def test_the_example_workflow_is_valid() -> None:
    jsonschema.validate(read(WORKFLOW), schema("github-workflows"))


def test_the_schemas_refuse_what_is_wrong() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**ACTION, "runs": {"using": "composite"}}, schema("github-actions"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"on": "push"}, schema("github-workflows"))


def test_the_workflow_says_what_the_action_takes() -> None:
    steps = read(WORKFLOW)["jobs"]["memcalc"]["steps"]
    ours = [step for step in steps if step.get("uses", "").endswith("/memcalc@main")]
    text = WORKFLOW.read_text()

    assert len(ours) == 2
    assert all(step["with"].keys() <= ACTION["inputs"].keys() for step in ours)
    assert set(re.findall(r"steps\.\w+\.outputs\.([\w-]+)", text)) <= ACTION["outputs"].keys()


def run(project: Path, path: str, **inputs: str) -> tuple[int, str, dict[str, str], str]:
    """The step `check` with these inputs: exit code, log, outputs, summary."""
    step = next(step for step in ACTION["runs"]["steps"] if step.get("id") == "check")
    given = {name: str(each.get("default", "")) for name, each in ACTION["inputs"].items()} | {
        name.replace("_", "-"): value for name, value in inputs.items()
    }
    environment = {name: INPUT.sub(lambda match: given[match[1]], text) for name, text in step["env"].items()}
    out, summary = project.parent / "output", project.parent / "summary"
    assert INPUT.search(step["run"]) is None, "an input within the script could run commands"
    process = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],  # as a runner starts it
        cwd=project / given["working-directory"],
        env={
            **environment,
            "PATH": path,
            "RUNNER_TEMP": str(project.parent / "temp"),
            "GITHUB_OUTPUT": str(out),
            "GITHUB_STEP_SUMMARY": str(summary),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    outputs = dict(line.split("=", 1) for line in out.read_text().splitlines())
    return process.returncode, process.stdout, outputs, summary.read_text() if summary.exists() else ""


def test_a_project_that_fits(project: Path, path_with_memcalc: str) -> None:
    code, log, outputs, summary = run(project, path_with_memcalc)

    assert (code, outputs["exit-code"]) == (0, "0")
    assert "3 configs checked: 3 fit" in log
    assert "::error" not in log
    assert summary.startswith("**memcalc**: 3 configs checked: 3 fit")
    assert json.loads(Path(outputs["json"]).read_text())["exit_code"] == 0
    assert json.loads(Path(outputs["sarif"]).read_text())["version"] == "2.1.0"
    assert Path(outputs["junit"]).read_text().startswith("<?xml")


def test_all_inputs_arrive(project: Path, path_with_memcalc: str) -> None:
    """Each changes something, also where it holds blanks; lines are items."""
    _, _, outputs, _ = run(project, path_with_memcalc)
    baseline = project.parent / "main one.json"
    baseline.write_text(Path(outputs["json"]).read_text())
    (project / "my configs").mkdir()
    (project / "my configs" / "a b.yaml").write_text("preset: gpt2\n")
    code, log, outputs, _ = run(
        project,
        path_with_memcalc,
        paths="configs/pretrain.yaml\nmy configs",
        gpu="a100-80gb",
        budget="79GiB",
        margin="1%",
        set="data_parallel=7\ntraining.recompute=full\n",
        baseline=str(baseline),
        max_growth="0",
    )
    document = json.loads(Path(outputs["json"]).read_text())
    first, second = document["configs"]

    assert (code, outputs["exit-code"]) == (1, "1")
    assert "::error file=configs/pretrain.yaml,title=memcalc%3A grew::needs " in log
    assert (first["path"], second["path"]) == ("configs/pretrain.yaml", "my configs/a b.yaml")
    assert first["gpu"] == second["gpu"] == "a100-80gb"
    assert document["budget_bytes"] == 79 * 2**30
    assert first["margin_bytes"] == -(-79 * 2**30 // 100)
    assert first["change"]["allowed_bytes"] == 0
    assert first["change"]["difference_bytes"] > 0


def test_wrong_input_is_an_error_without_files(project: Path, path_with_memcalc: str) -> None:
    code, log, outputs, summary = run(project, path_with_memcalc, gpu="h9000")

    assert code == 2
    assert "'h9000' is not a known GPU" in log
    assert outputs == {"exit-code": "2"}
    assert summary == ""


def test_an_input_is_never_a_command(project: Path, path_with_memcalc: str) -> None:
    code, _, _, _ = run(project, path_with_memcalc, paths='$(touch pwned)\n"; touch pwned; "\n--help')

    assert code == 2
    assert not (project / "pwned").exists()


@pytest.mark.parametrize(
    "name", [".github/workflows/memory.yml", ".gitlab-ci.yml", ".pre-commit-config.yaml", "pre-commit-installed.yaml"]
)
def test_the_documentation_shows_the_files_themselves(name: str) -> None:
    example = (ROOT / "docs" / "examples" / "project" / name).read_text()

    assert f"```yaml\n{example}```\n" in (ROOT / "docs" / "guides" / "checking.md").read_text()


def test_the_readme_names_the_action_of_the_example() -> None:
    used = {step.get("uses") for step in read(WORKFLOW)["jobs"]["memcalc"]["steps"]}
    shown = re.findall(r"`uses: ([^`]+)`", (ROOT / "README.md").read_text())

    assert shown
    assert set(shown) <= used
