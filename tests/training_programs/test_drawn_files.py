"""Files of programs that nobody ran: a file without its program's name never needs less than with it."""

from __future__ import annotations

from itertools import chain

import pytest

from benchmarks.programs.compare import sized
from benchmarks.programs.record import RECORDINGS, described, read_records
from benchmarks.programs.registry import FAMILIES
from tests.thinning import quick_every

# memcalc's own YAML: without a framework it describes memcalc's training step.
OWN_FILES = ("lightning", "loop", "loop-compiled")
NEVER_RAN = ("trainer-4.57-fsdp",)  # no releases are recorded
LEAST = 0.98  # of the named program's peak


def versions_of(name: str) -> dict[str, str]:
    """The releases with which the family's programs were recorded."""
    records = chain.from_iterable(map(read_records, sorted(RECORDINGS.glob(f"*/{name}.jsonl"))))
    return dict(next(records)["versions"])


@pytest.mark.parametrize("name", quick_every(3, [name for name in FAMILIES if name not in (*OWN_FILES, *NEVER_RAN)]))
def test_no_guess_makes_a_run_smaller(name: str) -> None:
    for number in range(3):
        record = {**described(FAMILIES[name].program("drawn", number)), "versions": versions_of(name)}
        named, unnamed = (sized(record, named=named, replay=False) for named in (True, False))

        assert bool(unnamed.problem) <= bool(named.problem), unnamed.problem  # FSDP1 rejects some 4-bit weights
        assert unnamed.allocated >= LEAST * named.allocated, number
