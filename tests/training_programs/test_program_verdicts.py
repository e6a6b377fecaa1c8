"""Verdicts of recorded programs, each from its own file."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import pytest

from benchmarks.programs.registry import FAMILIES
from tools.programs import JudgedProgram, judged
from tools.recorded_errors import program_runs, programs_of

QUICK = ("trl-sft", "accelerate-fsdp2", "trainer-5-zero", "axolotl-lora")


# Programs that finish with less than is replayed: the file leaves open how long or how padded the batches of the data
# are.
TOO_MUCH = ("axolotl held-out 3", "torchtune-qat held-out 0", "trl-sft held-out-2 3")


def check(programs: Iterable[JudgedProgram]) -> None:
    """No verdict contradicts the dry run: a program needs what it allocates, and finishes with what it reserves."""
    for run, small, large in programs:
        assert small != "fits", run.name
        assert large != "does-not-fit" or run.name in TOO_MUCH, run.name


@pytest.mark.parametrize("family", QUICK)
def test_one_program_of_a_family(family: str) -> None:
    programs = [*islice(judged(programs_of([FAMILIES[family]])), 1)]

    assert programs
    check(programs)


@pytest.mark.long
def test_all_programs() -> None:
    check(judged(program_runs()))
