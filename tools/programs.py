"""Tables of the programs of frameworks that were dry-run, beside what memcalc says of their own files."""

from __future__ import annotations

from functools import lru_cache

from benchmarks.programs.compare import Line, failed, ran_out, sized, summary
from benchmarks.programs.record import read_records, record_path
from benchmarks.programs.registry import FAMILIES


@lru_cache(maxsize=4)
def compared(seed: str, *, named: bool) -> dict[str, list[Line]]:
    """Every recorded program of a draw, by family."""
    found: dict[str, list[Line]] = {}
    for family in FAMILIES:
        path = record_path(family, seed)
        if path.exists():
            found[family] = [
                sized(record, named=named) if record["good"] or ran_out(record) else failed(record)
                for record in read_records(path)
            ]
    return found


def programs_table(seed: str, how: str) -> str:
    """One row a family: errors of allocated and reserved memory.

    Args:
        seed: of the draw: "development" or "held-out".
        how: "named": framework and releases are given; "unnamed": the file alone.
    """
    return "\n".join(summary(compared(seed, named=how == "named"))) + "\n"


TABLES = {"programs": programs_table}
