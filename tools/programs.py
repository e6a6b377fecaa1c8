"""Tables of dry-run programs of frameworks, compared with estimates from their config files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from statistics import median
from typing import NamedTuple

from benchmarks.programs import compiled
from benchmarks.programs.compare import Line, failed, ran_out, sized, summary
from benchmarks.programs.record import read_records, record_path
from benchmarks.programs.registry import FAMILIES
from memcalc.estimation.outside_allocator import outside_bytes
from memcalc.importers.loading import load
from memcalc.layout.stages import stages_of
from memcalc.ledger.verdict import Answer
from memcalc.spec.hardware.gpus import with_budget
from memcalc.verdict.judge import as_assumed, judge
from memcalc.verdict.needs import need_of
from memcalc.verdict.run_types import PROGRAMS, program_kinds
from tools.markdown import table
from tools.recorded_errors import Compared, Recorded, compiled_runs, program_runs
from tools.recorded_errors import compared as replayed

UNDER = 0.02  # of the recorded peak
NOTABLE = 0.01  # of the replayed reserved memory


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


def lengths_table() -> str:
    """Return a table of programs with batches of different lengths: reserved memory beside the replays.

    One row per engine. The first columns compare with batches of one length, the last two with the worst order.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for run in program_runs():
        need = need_of(run.spec, run.spec.gpu) if run.spec.training.variable_lengths else None
        if need is not None and need.overhead is not None:
            pair = run.reserved / need.reserved_bytes - 1, run.reserved / need.most_reserved_bytes - 1
            found.setdefault(program_kinds(run.spec)[0], []).append(pair)
    rows = [(kind, *_lengths_cells(pairs)) for kind, pairs in sorted(found.items())]
    every = [pair for pairs in found.values() for pair in pairs]
    head = ("programs", "runs", "over 1% above one length", "highest", "over 1% above the worst order", "highest")
    return table([*head], [*rows, ("all", *_lengths_cells(every))])


class JudgedProgram(NamedTuple):
    """The verdicts of a recorded program on two GPUs.

    Args:
        run: the program.
        small: on a GPU on which the allocator can use a byte less than the program allocated: it cannot finish.
        large: on one on which it can use what the program reserved: it finishes.
    """

    run: Recorded
    small: Answer
    large: Answer


def judged(runs: Iterable[Recorded]) -> Iterator[JudgedProgram]:
    """Judge recorded programs; those that need more than their GPU has stay out."""
    for run in runs:
        gpu = run.spec.gpu
        assert gpu is not None
        outside = outside_bytes(run.spec, gpu, stages_of(run.spec)[run.stage])
        if run.reserved + outside <= gpu.usable_bytes:
            rooms = (run.allocated - 1, run.reserved)
            specs = [load(run.spec, gpu=with_budget(gpu.name, f"{room + outside}B")) for room in rooms]
            small, large = (as_assumed(judge(spec), spec).answer for spec in specs)
            yield JudgedProgram(run, small, large)


def verdicts_table() -> str:
    """Return a table of the verdicts of recorded programs, one row per engine."""
    found: dict[str, Counter[tuple[str, Answer]]] = {}
    for run, small, large in judged(program_runs()):
        for kind in (program_kinds(run.spec)[0], "all"):
            found.setdefault(kind, Counter()).update([("small", small), ("large", large)])
    answers: dict[str, tuple[Answer, ...]] = {
        "small": ("does-not-fit", "unknown", "fits"),
        "large": ("fits", "unknown", "does-not-fit"),
    }
    rows = [
        (
            f"{kind}, others" if kind == PROGRAMS else kind,
            *(str(count[gpu, answer]) for gpu, order in answers.items() for answer in order),
        )
        for kind, count in sorted(found.items(), key=lambda item: (item[0] == "all", item[0]))
    ]
    head = ("programs", "too small: DOES NOT FIT", "CANNOT SAY", "false FITS")
    return table([*head, "large enough: FITS", "CANNOT SAY", "false DOES NOT FIT"], rows)


def _lengths_cells(pairs: list[tuple[float, float]]) -> tuple[str, ...]:
    cells = []
    for errors in zip(*pairs, strict=True):
        cells += [str(sum(error > NOTABLE for error in errors)), f"{max(errors):+.1%}"]
    return (str(len(pairs)), *cells)


TABLES: dict[str, Callable[..., str]] = {
    "programs": programs_table,
    "programs-compiled": compiled_table,
    "programs-lengths": lengths_table,
    "programs-verdicts": verdicts_table,
}
