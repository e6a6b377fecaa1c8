"""Tables of dry-run programs of frameworks, compared with estimates from their config files."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from statistics import median

from benchmarks.programs import compiled
from benchmarks.programs.compare import Line, failed, ran_out, sized, summary
from benchmarks.programs.record import read_records, record_path
from benchmarks.programs.registry import FAMILIES
from tools.markdown import table
from tools.recorded_errors import Compared, compiled_runs
from tools.recorded_errors import compared as replayed

UNDER = 0.02  # of the recorded peak


@lru_cache(maxsize=4)
def compared(seed: str, *, named: bool) -> dict[str, list[Line]]:
    """Every recorded program of a draw, by family."""
    found: dict[str, list[Line]] = {}
    of_their_own = {family.name for family in compiled.FAMILIES}
    for family in (name for name in FAMILIES if name not in of_their_own):
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


def compiled_table() -> str:
    """Return a table, one row per family of compiled programs: the estimate of eager execution and the compiled run."""
    runs = [replayed(run) for run in compiled_runs()]
    rows = []
    for family in compiled.FAMILIES:
        found = [each for each in runs if each.run.name.startswith(f"{family.name} ")]
        rows.append((family.name, *_compiled_cells(found)))
    head = ("programs", "runs", "allocated: lowest", "median", "highest", "reserved: lowest", "median", "highest")
    return table([*head, "over 2% too low"], [*rows, ("all", *_compiled_cells(runs))])


def _compiled_cells(runs: list[Compared]) -> tuple[str, ...]:
    allocated = [(each.allocated or 0) / each.run.allocated - 1 for each in runs]
    reserved = [1 / (1 + each.error) - 1 for each in runs]
    figures = [f"{value:+.1%}" for found in (allocated, reserved) for value in (min(found), median(found), max(found))]
    return (
        str(len(runs)),
        *figures,
        str(sum(min(two) < -UNDER for two in zip(allocated, reserved, strict=True))),
    )


TABLES: dict[str, Callable[..., str]] = {"programs": programs_table, "programs-compiled": compiled_table}
