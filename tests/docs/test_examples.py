"""Each file of docs/examples says what it shows, and the command in its comment gives the answer that is known."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from tests.fuzz.formats import invoked

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


def test_every_example_says_what_it_shows() -> None:
    files = [path for path in EXAMPLES.iterdir() if path.suffix in (".yaml", ".yml", ".toml", ".sh")]

    assert {path.name for path in files} >= set(VERDICTS)
    assert {path.name for path in files if not path.read_text().removeprefix("#!/bin/bash\n").startswith("# ")} == set()
    assert len(VERDICTS) >= 12


@pytest.mark.parametrize("name", VERDICTS)
def test_its_command_gives_the_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (EXAMPLES / name).read_text()
    comment = [line for line in text.splitlines() if line.startswith("# ")]
    command = COMMAND.search(text)

    assert len(comment[0]) > 40  # what it shows
    assert command is not None
    words = shlex.split(command[1])
    assert words[1] == os.path.relpath(EXAMPLES / name)
    shown = invoked(*words)
    assert (shown.code, shown.err) == (0, "")
    found = json.loads(invoked(*(word for word in words if word not in ("--all-ranks", "--full")), "-f", "json").out)
    assert found["verdict"] == VERDICTS[name]
