"""Damaged files of every format: an answer or one message, in seconds, and no control characters on any stream."""

from __future__ import annotations

import random
import re
import zlib
from pathlib import Path

import pytest

from memcalc.errors import MOST_ERRORS
from tests.fuzz.damage import damaged
from tests.fuzz.formats import FORMATS, Answer
from tests.fuzz.test_fuzz import NoAnswer, time_limit
from tests.importers.cases import CASES
from tests.thinning import quick_every

SECONDS = 20.0  # of this process's time; the bar for what may be called a hang
CODES = {0, 1, 2}
MUTATIONS = 2_000  # of every format
BROKEN = Path(__file__).with_name("broken")

CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f]")
COMMAND = re.compile(r"^\s*::|##\[", re.MULTILINE)


def complaint(answer: Answer, *, annotated: bool = False) -> str | None:
    """Return the defect of an answer; None if there is none."""
    code, out, err = answer
    if code not in CODES:
        return f"exit code {code}"
    if "Traceback" in out + err:
        return "a traceback"
    if "a bug of memcalc" in out:
        return "a bug in a report"
    for name, text in (("stdout", out), ("stderr", err)):
        found = CONTROL.search(text)
        if found:
            return f"{found[0]!r} on {name}"
        if COMMAND.search(text) and not (annotated and name == "stdout"):
            return f"a workflow command on {name}"
    messages = err.splitlines()
    if code == 2 and not err.startswith("error: "):
        return "refused without a message"
    untold = [line for line in messages if not line.startswith(("error: ", "warning: "))]
    if len(messages) > MOST_ERRORS or len(untold) > 1 or any(len(line) > 3_000 for line in messages):
        return f"a message of {len(err)} characters and {err.count(chr(10))} lines"
    return None


def read(name: str, content: bytes, folder: Path) -> str | None:
    """The complaint about one file of a format."""
    path = folder / FORMATS[name].name
    path.write_bytes(content)
    try:
        with time_limit(SECONDS):
            answer = FORMATS[name].read(path)
    except (Exception, NoAnswer) as error:  # noqa: BLE001 -- whatever escapes is the finding
        return f"{type(error).__name__}: {str(error)[:200]}"
    return complaint(answer, annotated="github" in name or name == "checked config")


def complaints(name: str, seed: int, samples: int, folder: Path) -> list[str]:
    """The complaints about a number of damaged files; `damaged(random.Random(label), ...)` makes each again."""
    found = []
    for index in range(samples):
        label = f"{name}:{seed}:{index}"
        problem = read(name, damaged(random.Random(label), FORMATS[name].content), folder)
        if problem is not None:
            found.append(f"{label}: {problem}")
    return found


# Files of frameworks are also read by tests/importers: a sample of them.
OTHERS = [name for name in FORMATS if name.removesuffix(" file") not in CASES]
QUICK = [*OTHERS, *quick_every(4, [name for name in FORMATS if name not in OTHERS])]


@pytest.mark.parametrize("name", QUICK)
def test_the_whole_file_is_read(name: str, tmp_path: Path) -> None:
    """A fuzzer that begins with a file that is refused tests nothing."""
    path = tmp_path / FORMATS[name].name
    path.write_bytes(FORMATS[name].content)

    assert FORMATS[name].read(path).code in (0, 1)


@pytest.mark.parametrize("mutations", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", QUICK)
def test_a_few_damaged_files(name: str, mutations: int, tmp_path: Path) -> None:
    assert complaints(name, 1, mutations, tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_thousands_of_damaged_files(name: str, tmp_path: Path) -> None:
    assert complaints(name, 2, MUTATIONS, tmp_path) == []


def corpus() -> list[tuple[str, str]]:
    """What broke memcalc once: "<format>-<anything>" in the directory beside this file, each packed by zlib."""
    return [(path.name.rpartition("-")[0], path.name) for path in sorted(BROKEN.glob("*.z"))]


@pytest.mark.parametrize(("name", "file"), quick_every(2, corpus(), unpack=True))
def test_what_broke_once_is_read_or_refused(name: str, file: str, tmp_path: Path) -> None:
    assert read(name, zlib.decompress((BROKEN / file).read_bytes()), tmp_path) is None
