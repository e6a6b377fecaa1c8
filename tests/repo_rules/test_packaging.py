"""What users get: a wheel that works alone, and presets that are found however memcalc was installed."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

l, d, V = 96, 12288, 50257  # noqa: E741 -- the paper's symbol
GPT3_PARAMETERS = l * (12 * d**2 + 13 * d) + V * d

SHOW_PLACE = "import memcalc, pathlib; print(pathlib.Path(memcalc.__file__).parent)"


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Standard output of a command that must succeed, without this process's own Python settings."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    process = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, f"{command}\n{process.stdout}\n{process.stderr}"
    return process.stdout


def check_estimate(*command: str | Path, cwd: Path, **environment: str) -> None:
    """`memcalc estimate gpt3.yaml` gives the published numbers, from a directory that holds nothing."""
    document = json.loads(run(*command, "estimate", "gpt3.yaml", "--format", "json", cwd=cwd, **environment))

    assert document["textbook"]["parameters"] == GPT3_PARAMETERS
    assert document["textbook"]["model_state_bytes"] == 20 * GPT3_PARAMETERS
    assert sum(document["components"].values()) == document["peak"]["allocated_bytes"]


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    folder = tmp_path / "nowhere"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout's sources, so that nothing is found by accident in the checkout itself."""
    folder = tmp_path_factory.mktemp("clone") / "llm-memcalc"
    folder.mkdir()
    for name in ("memcalc", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, clone, cwd=folder)
    (built,) = folder.glob("llm_memcalc-*-py3-none-any.whl")
    return built


def environment(folder: Path) -> Path:
    """The interpreter of a new, empty virtual environment."""
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def borrow_packages(folder: Path) -> None:
    """Dependencies and the build backend come from this environment, behind the new one's own packages."""
    site_packages = folder.joinpath("lib", f"python3.{sys.version_info.minor}", "site-packages")
    (site_packages / "zz-dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")


def pip_install(python: Path, *arguments: str | Path) -> None:
    """Install into another environment with this one's pip."""
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-input",
        "--no-compile",
        *arguments,
        cwd=ROOT,
    )


def test_the_wheel_holds_presets_data_and_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())

    presets = {f"memcalc/configs/{path.name}" for path in (ROOT / "configs").iterdir() if path.is_file()}
    data = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "memcalc" / "data").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    page = {f"memcalc/page/static/{path.name}" for path in (ROOT / "memcalc" / "page" / "static").iterdir()}
    assert presets | data | page | {"memcalc/py.typed", "memcalc/report/plots/page.html"} <= names
    assert not any("pyodide" in name.lower() or name.endswith(".wasm") for name in names)
    assert not any(name.startswith(("tests/", "configs/")) for name in names)


def test_the_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path, nowhere: Path) -> None:
    python = environment(tmp_path / "venv")
    borrow_packages(tmp_path / "venv")
    pip_install(python, "--no-deps", "--force-reinstall", wheel)

    check_estimate(tmp_path / "venv" / "bin" / "memcalc", cwd=nowhere)
    place = Path(run(python, "-c", SHOW_PLACE, cwd=nowhere).strip())
    assert place.is_relative_to(tmp_path / "venv")


@pytest.mark.long
def test_the_wheel_works_alone(wheel: Path, tmp_path: Path, nowhere: Path) -> None:
    """Installed with its own dependencies and nothing else: no torch, no checkout."""
    python = environment(tmp_path / "venv")
    pip_install(python, "-c", ROOT / "constraints.txt", wheel)

    installed = run(
        python, "-c", "import importlib.metadata as m; print(*{d.name for d in m.distributions()})", cwd=nowhere
    )
    assert not {"torch", "transformers", "scipy", "matplotlib"} & set(installed.split())
    check_estimate(tmp_path / "venv" / "bin" / "memcalc", cwd=nowhere)


@pytest.mark.long
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the lowest versions have no wheels for it")
def test_the_lowest_versions_declared_are_enough(wheel: Path, tmp_path: Path, nowhere: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = environment(tmp_path / "venv")

    pip_install(python, wheel, *(requirement.replace(">=", "==") for requirement in project["dependencies"]))

    check_estimate(tmp_path / "venv" / "bin" / "memcalc", cwd=nowhere)
    for command in ("models", "gpus", "schema"):
        run(tmp_path / "venv" / "bin" / "memcalc", command, cwd=nowhere)


@pytest.mark.long
def test_presets_resolve_in_a_clone(clone: Path, nowhere: Path) -> None:
    check_estimate(sys.executable, "-m", "memcalc", cwd=nowhere, PYTHONPATH=str(clone))
    place = run(sys.executable, "-c", SHOW_PLACE, cwd=nowhere, PYTHONPATH=str(clone))
    assert Path(place.strip()) == clone / "memcalc"


@pytest.mark.long
def test_presets_resolve_in_an_editable_install(clone: Path, tmp_path: Path, nowhere: Path) -> None:
    python = environment(tmp_path / "venv")
    borrow_packages(tmp_path / "venv")
    pip_install(python, "--no-deps", "--no-build-isolation", "--force-reinstall", "-e", clone)

    check_estimate(tmp_path / "venv" / "bin" / "memcalc", cwd=nowhere)
    place = run(python, "-c", SHOW_PLACE, cwd=nowhere)
    assert Path(place.strip()) == clone / "memcalc"


def test_the_source_distribution_holds_the_tests(tmp_path: Path) -> None:
    from hatchling.builders.sdist import SdistBuilder

    names = {str(file.distribution_path) for file in SdistBuilder(str(ROOT)).recurse_included_files()}

    assert {"tests/repo_rules/test_packaging.py", "configs/gpt3.yaml", "Makefile", "constraints.txt"} <= names
