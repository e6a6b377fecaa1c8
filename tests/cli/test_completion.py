"""Shell completion: presets, cards, fields, components."""

import os
import subprocess
import sys

import pytest


def completions(line: str) -> list[str]:
    words = line.split(" ")
    environment = {"_MEMCALC_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    process = subprocess.run(
        [sys.executable, "-c", "from memcalc.cli.app import main; main()"],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )
    assert process.stderr == ""
    return process.stdout.split()


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("memcalc es", ["estimate"]),
        ("memcalc estimate gpt2", ["gpt2", "gpt2-large", "gpt2-medium", "gpt2-xl"]),
        ("memcalc estimate gpt3 --gpu h100", ["h100-80gb", "h100-pcie", "h100-nvl"]),
        ("memcalc estimate gpt3 --set hidden", ["hidden_size="]),
        ("memcalc estimate gpt3 --explain act", ["activations"]),
        ("memcalc estimate gpt3 --format ", ["table", "json", "markdown", "csv"]),
        ("memcalc measure --model llama-7", ["llama-7b"]),
    ],
)
def test_offers(line: str, offers: list[str]) -> None:
    assert completions(line) == offers
