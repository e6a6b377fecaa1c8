"""The pre-commit hooks: by pre-commit's own validation, and run by pre-commit itself, offline."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.thinning import quick_every

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / ".pre-commit-hooks.yaml"
EXAMPLE = ROOT / "docs" / "examples" / "project" / ".pre-commit-config.yaml"
HOOKS = {hook["id"]: hook for hook in yaml.safe_load(MANIFEST.read_text())}


def pre_commit(*arguments: str, folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    """pre-commit with a home of its own, outside the commit hook's environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        [sys.executable, "-m", "pre_commit", *arguments],
        cwd=folder,
        env=clean | {"PATH": path, "PRE_COMMIT_HOME": str(folder.parent / "home"), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_manifest_and_example_are_valid(tmp_path: Path, path_with_memcalc: str) -> None:
    for verb, file in (("validate-manifest", MANIFEST), ("validate-config", EXAMPLE)):
        process = pre_commit(verb, str(file), folder=tmp_path, path=path_with_memcalc)
        assert process.returncode == 0, process.stdout


def test_the_hook_of_an_installed_memcalc(project: Path, path_with_memcalc: str) -> None:
    (project / ".pre-commit-config.yaml").write_text((EXAMPLE.parent / "pre-commit-installed.yaml").read_text())
    for line in (["git", "init", "--quiet"], ["git", "add", "."]):
        subprocess.run(line, cwd=project, check=True, timeout=60)
    found = pre_commit("run", "--all-files", "--verbose", folder=project, path=path_with_memcalc)

    assert found.returncode == 0, found.stdout + found.stderr
    assert "3 configs checked: 3 fit" in found.stdout


def test_the_example_names_a_hook() -> None:
    (repo,) = yaml.safe_load(EXAMPLE.read_text())["repos"]

    assert {hook["id"] for hook in repo["hooks"]} <= HOOKS.keys()


@pytest.mark.parametrize("hook", quick_every(2, HOOKS))
def test_hooks(hook: str, project: Path, path_with_memcalc: str) -> None:
    """The hook as it stands, but for the environment it would install itself into."""
    own = {**HOOKS[hook], "language": "system"}
    (project / ".pre-commit-config.yaml").write_text(yaml.safe_dump({"repos": [{"repo": "local", "hooks": [own]}]}))
    (project / "compose.yaml").write_text("services: {}\n")
    (project / "package.json").write_text("{}\n")
    for line in (["git", "init", "--quiet"], ["git", "add", "."]):
        subprocess.run(line, cwd=project, check=True, timeout=60)
    fits = pre_commit("run", "--all-files", "--verbose", folder=project, path=path_with_memcalc)

    assert fits.returncode == 0, fits.stdout + fits.stderr
    assert "3 configs checked: 3 fit" in fits.stdout

    (project / "configs" / "more.yaml").write_text("preset: llama-3-70b\n")
    subprocess.run(["git", "add", "."], cwd=project, check=True, timeout=60)
    fails = pre_commit("run", folder=project, path=path_with_memcalc)  # what is staged: all of it, so far
    assert fails.returncode == 1
    assert "exit code: 1" in fails.stdout
    assert "4 configs checked: 3 fit, 1 too large" in fails.stdout
