"""Which Python a command will run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memcalc.errors import InputError
from memcalc.nullcuda.interpreters import interpreters


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    path = tmp_path / "launch"
    path.write_text("")
    path.chmod(0o755)
    return path


def test_a_python_that_is_named_is_the_one() -> None:
    assert interpreters((sys.executable, "train.py")) == [sys.executable]


@pytest.mark.parametrize(
    "text",
    [
        "#!{python}\n",
        "#!{python} -u\nimport torch",
        "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n",
    ],
)
def test_a_scripts_first_lines_name_its_python(script: Path, text: str) -> None:
    script.write_text(text.format(python=sys.executable))

    assert interpreters(("launch",)) == [sys.executable]


def test_env_looks_on_the_path(script: Path) -> None:
    (script.parent / "python3").symlink_to(sys.executable)
    script.write_text("#!/usr/bin/env -S python3 -u\n")

    assert interpreters(("launch",)) == [str(script.parent / "python3")]


def test_a_shell_script_runs_what_is_on_the_path(script: Path) -> None:
    (script.parent / "python").symlink_to(sys.executable)
    script.write_text("#!/bin/bash\npython train.py\n")

    assert interpreters(("launch",))[0] == str(script.parent / "python")
    assert interpreters(("launch",))[-1] == sys.executable


def test_a_missing_command_is_invalid_input() -> None:
    with pytest.raises(InputError, match="'no-such-command' is not an executable command"):
        interpreters(("no-such-command",))


def test_a_python_file_without_its_python_gets_a_hint() -> None:
    with pytest.raises(InputError, match=r"Try: python train\.py"):
        interpreters(("train.py",))
