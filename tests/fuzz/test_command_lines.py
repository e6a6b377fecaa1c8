"""Random command lines: an answer or one message, in seconds, no control characters, and nothing left behind."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz.command_lines import COMMANDS, FILES, TINY, command_line
from tests.fuzz.formats import FORMATS, HF_CONFIG, Answer, invoked
from tests.fuzz.test_formats import complaint
from tests.fuzz.test_fuzz import NoAnswer, time_limit

# Of this process's time; the bar for what may be called a hang. `fit` of Llama 3 70B over four GPUs takes 22 s on a busy
# machine: it replays 36 runs.
SECONDS = 60.0


def _filled(folder: Path) -> None:
    """Nothing but the files that the command lines name."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in FILES:
        (folder / FORMATS[name].name).write_bytes(FORMATS[name].content)
    (folder / "folder").mkdir()
    (folder / "folder" / "config.json").write_bytes(HF_CONFIG)
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "model.py").write_text("class Net: pass\n")
    os.mkfifo(folder / "pipe")


def without_progress(answer: Answer) -> Answer:
    """An answer without the line for each cell of a sweep."""
    return answer._replace(err=re.sub(r"^\d+ of \d+: .*\n", "", answer.err, flags=re.MULTILINE))


def complaints(seed: int, samples: int, folder: Path) -> list[str]:
    """The complaints about a number of command lines; `random.Random(label)` makes each again."""
    found: list[str] = []
    codes: Counter[int] = Counter()
    names: set[str] = set()
    for index in range(samples):
        label = f"{seed}:{index}"
        rng = random.Random(label)
        words = command_line(rng, rng.choice(COMMANDS))
        if {path.name for path in folder.iterdir()} != names:
            _filled(folder)
            names = {path.name for path in folder.iterdir()}
        try:
            with time_limit(SECONDS):
                answer = invoked(*words)
            codes[answer.code] += 1
            problem = (
                None if answer.code == 3 else complaint(without_progress(answer), annotated="github" in " ".join(words))
            )
        except (Exception, NoAnswer) as error:  # noqa: BLE001 -- whatever escapes is the finding
            problem = f"{type(error).__name__}: {str(error)[:200]}"
        if left := [path.name for path in folder.iterdir() if path.name.startswith(".")]:
            problem = f"left {left}"
        if problem is not None:
            found.append(f"{label}: {[word[:60] for word in words]}: {problem}")
    print(f"\n{samples} command lines, exit codes {dict(codes)}")
    return found


@pytest.mark.parametrize(("seed", "samples"), [(3, 6), pytest.param(1, 12, marks=pytest.mark.long)])
def test_some_command_lines(seed: int, samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick seed has no search for layouts."""
    monkeypatch.chdir(tmp_path)

    assert complaints(seed, samples, tmp_path) == []


@pytest.mark.long
def test_five_thousand_command_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with capsys.disabled():
        found = complaints(2, 5_000, tmp_path)

    assert found == []


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("value", ["9" * 5_000, "x" * 5_000, "a\n::error::b"])
def test_a_long_value_of_a_choice_is_shortened(command: str, value: str) -> None:
    answer = invoked(command, "gpt2", f"--format={value}")

    assert answer.code == 2
    assert complaint(answer) is None
