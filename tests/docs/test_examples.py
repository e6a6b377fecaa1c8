"""Each file of docs/examples says what it shows, and the command in its comment gives the answer that is known."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from tests.fuzz.formats import invoked
from tests.thinning import quick_every

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
COMMAND = re.compile(r"^# memcalc (.+)$", re.MULTILINE)

# What each comes to. A change here is a change of what users read in the comments.
VERDICTS = {
    "deepspeed-offload.yaml": "fits",
    "dpo.yaml": "fits",
    "finetune.sh": "fits",
    "fsdp2-8xh100.yaml": "fits",
    "llama-3-70b-64xh100.yaml": "fits",
    "long-context.yaml": "fits",
    "lora.yaml": "fits",
    "megatron-64xh100.yaml": "fits",
    "moe-8xh200.yaml": "fits",
    "one-gpu.yaml": "fits",
    "qlora-70b.yaml": "fits",
    "qlora-axolotl.yml": "fits",
    "serving.yaml": "fits",
    "torchtitan-8b.toml": "fits",
}
ANSWERS = {"fits": r"^FITS: needs "}  # on the screen
SLOW = ("serving.yaml",)  # its document has the largest batch and context, for which generation is replayed 39 times


def test_every_example_says_what_it_shows() -> None:
    files = [path for path in EXAMPLES.iterdir() if path.suffix in (".yaml", ".yml", ".toml", ".sh")]

    assert {path.name for path in files} >= set(VERDICTS)
    assert {path.name for path in files if not path.read_text().removeprefix("#!/bin/bash\n").startswith("# ")} == set()
    assert len(VERDICTS) >= 12


def command_of(name: str) -> list[str]:
    """Return the words of the command in the file's comment."""
    command = COMMAND.search((EXAMPLES / name).read_text())
    assert command is not None
    return shlex.split(command[1])


@pytest.mark.parametrize("name", quick_every(2, VERDICTS))
def test_its_command_gives_the_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (EXAMPLES / name).read_text()
    comment = [line for line in text.splitlines() if line.startswith("# ")]
    words = command_of(name)

    assert len(comment[0]) > 40  # what it shows
    assert words[1] == os.path.relpath(EXAMPLES / name)
    shown = invoked(*words)
    assert (shown.code, shown.err) == (0, "")
    assert re.search(ANSWERS[VERDICTS[name]], shown.out, re.MULTILINE)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in SLOW else ()) for name in VERDICTS]
)
def test_its_document_has_the_verdict(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = command_of(name)
    found = json.loads(invoked(*(word for word in words if word not in ("--all-ranks", "--full")), "-f", "json").out)
    assert found["verdict"] == VERDICTS[name]
