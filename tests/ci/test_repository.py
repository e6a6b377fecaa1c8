"""What GitHub and contributors expect of the repository: workflows, citation, hooks, one version, one OWNER."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import memcalc

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION_LINE = 'test "$GITHUB_REF_NAME" = "v$(sed -n \'s/^__version__ = "\\(.*\\)"$/\\1/p\' memcalc/__init__.py)"'

# Every file that names the account that hosts the repository; docs/contributing.md says how to replace it.
NAMES_THE_OWNER = {
    "CITATION.cff",
    "README.md",
    "docs/guides/checking.md",
    "docs/contributing.md",
    "docs/examples/project/.github/workflows/memory.yml",
    "docs/examples/project/.pre-commit-config.yaml",
    "mkdocs.yml",
}


def schema(name: str) -> Any:
    """A schema of SchemaStore, as check-jsonschema carries it."""
    path = files("check_jsonschema") / "builtin_schemas" / "vendor" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def read(path: Path) -> Any:
    """YAML as GitHub reads it: `on` is a word."""
    return yaml.safe_load(re.sub(r"^on:", '"on":', path.read_text(), flags=re.MULTILINE))


def steps(workflow: Any, job: str) -> list[Any]:
    found: list[Any] = workflow["jobs"][job]["steps"]
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_are_valid(path: Path) -> None:
    jsonschema.validate(read(path), schema("github-workflows"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_no_rights_by_default(path: Path) -> None:
    assert read(path)["permissions"] == {"contents": "read"}


def test_tests_run_on_every_supported_python() -> None:
    (workflow,) = (read(path) for path in WORKFLOWS if path.name == "test.yml")
    supported = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))

    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python-version"] == supported
    assert PROJECT["requires-python"] == f">={supported[0]}"
    assert any(step.get("run", "").startswith("make test ") for step in steps(workflow, "test"))


def test_a_release_is_built_from_the_tag_of_its_version_and_published_without_a_token() -> None:
    (workflow,) = (read(path) for path in WORKFLOWS if path.name == "release.yml")
    commands = [step["run"] for step in steps(workflow, "build") if "run" in step]
    environment = {"GITHUB_REF_NAME": f"v{memcalc.__version__}", "PATH": "/usr/bin:/bin"}

    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    assert VERSION_LINE in commands
    assert subprocess.run(["bash", "-c", VERSION_LINE], cwd=ROOT, env=environment, check=False).returncode == 0
    environment["GITHUB_REF_NAME"] = "v0.0.0"
    assert subprocess.run(["bash", "-c", VERSION_LINE], cwd=ROOT, env=environment, check=False).returncode == 1
    assert workflow["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in json.dumps(workflow)


def test_the_site_is_built_on_each_push_and_deployed_from_main_alone() -> None:
    (workflow,) = (read(path) for path in WORKFLOWS if path.name == "docs.yml")
    commands = [step["run"] for step in steps(workflow, "build") if "run" in step]

    assert commands == ["make site page PYTHON=python", "cp -r build/page build/site/page"]
    assert workflow["jobs"]["deploy"]["if"] == "github.ref == 'refs/heads/main'"
    assert workflow["jobs"]["deploy"]["permissions"] == {"id-token": "write", "pages": "write"}


def test_the_citation_is_valid() -> None:
    jsonschema.validate(yaml.safe_load((ROOT / "CITATION.cff").read_text()), schema("citation-file-format"))


def test_hooks_for_contributors_are_valid(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pre_commit", "validate-config", str(ROOT / ".pre-commit-config.yaml")],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PRE_COMMIT_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert process.returncode == 0, process.stdout


def test_the_version_stands_in_one_place() -> None:
    """The changelog begins with the version; no other file repeats it."""
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert "version" in PROJECT["dynamic"]
    assert headings[0] == memcalc.__version__
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_changelog_is_short() -> None:
    """Each version has at most 80 lines, and its entries are grouped by use."""
    first, *sections = (ROOT / "CHANGELOG.md").read_text().split("\n## ")

    assert first.startswith("# Changelog")
    assert [section.splitlines()[0] for section in sections if len(section.splitlines()) > 80] == []
    assert all("\n### " in section for section in sections)


def test_files_that_name_the_owner_are_known() -> None:
    candidates = [
        *ROOT.glob("*.*"),
        *ROOT.glob(".*.yaml"),
        *(ROOT / ".github").rglob("*.yml"),
        *(path for path in (ROOT / "docs").rglob("*") if path.suffix in {".md", ".yml", ".yaml", ".toml"}),
    ]
    found = {
        path.relative_to(ROOT).as_posix()
        for path in candidates
        if path.is_file() and "OWNER/memcalc" in path.read_text()
    }

    assert found == NAMES_THE_OWNER
