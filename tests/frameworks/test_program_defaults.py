"""The tables of what programs decide: complete, and true of the runs that they describe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memcalc.spec.programs import PROGRAMS
from tools.program_defaults import EXAMPLES, program_defaults_table

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "frameworks" / "programs.md"
# Sized as SFT, with a limit that says so (frameworks/trl.py); and NeMo and GPT-NeoX: their files contain everything.
WITHOUT = {"kto", "orpo", "ppo", "nemo", "gpt-neox"}


def test_every_program_has_a_table_on_the_page() -> None:
    assert EXAMPLES.keys() == PROGRAMS.keys() - WITHOUT
    assert re.findall(r"generated: program-defaults (\S+) ", PAGE.read_text()) == list(EXAMPLES)


@pytest.mark.parametrize(
    ("program", "rows"),
    [
        (
            "trainer",
            [
                "| `loss_shift` | `logits` | transformers before 4.49 |",
                "| `recipe` | `amp` | transformers before 5.0 |",
            ],
        ),
        (
            "sft",
            [
                "| `loss` | `tiled` | TRL 1.15 |",
                "| `loss` | `chunked` | TRL before 1.15 |",
                "| `loss` | `materialized` | TRL before 1.7 |",
            ],
        ),
        ("accelerate", ["| `fsdp.wrap` | `layers` | Accelerate before 1.14 |", "| `fsdp.gradient_sync` | `last` |  |"]),
        ("litgpt", ["| `logits_until` | `step` |  |", "| `evaluation_when` | `both` |  |"]),
        ("lightning", ["| `zero_grad_before` | `backward` |  |"]),
        ("dpo", ["| `dropout` | `0.0` |  |", "| `reference_model` | `true` |  |"]),
    ],
)
def test_rows(program: str, rows: list[str]) -> None:
    found = program_defaults_table(program)

    assert [row for row in rows if row not in found] == []
