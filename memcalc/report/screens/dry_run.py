"""Report of `dry-run`: memory of each process, the verdict, and its limits."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from memcalc.nullcuda.result import NOT_MODELLED, WHOLE, Allocation, DryRun, PythonProcess, failure_line
from memcalc.nullcuda.sweep import Sweep
from memcalc.report.screen import BAD, GOOD, Column, Screen, TextTable, draw_grid, draw_line, draw_list, numeric
from memcalc.report.screens.sizing import VERDICT_STYLES
from memcalc.units import Unit, format_bytes, format_number

SHOWN = 10  # lines of the program, of those that were recorded

SMALLEST = 6  # cards that it would fit on


def draw_dry_run(screen: Screen, run: DryRun, unit: Unit) -> None:
    """Draw the screen of `memcalc dry-run`."""
    gpus = run.gpu.label if run.gpus == 1 else f"{run.gpus} x {run.gpu.label}"
    screen.line((f"{shlex.join(run.command)} on {gpus}, a null device: {run.outcome}", "bold"))
    screen.line()
    if run.usages:
        draw_grid(screen, usage_grid(run, unit))
    draw_line(screen, verdict(run, unit), 2, VERDICT_STYLES[run.answer])
    if run.fits:
        draw_line(screen, _smallest_gpus(run), 2)
    screen.line()
    failures = ((process_name(process), process.failure) for process in run.processes)
    draw_list(screen, "Failed", (f"{name}: {failure_line(failure)}" for name, failure in failures if failure))
    allocations = [allocation for process in run.processes for allocation in process.allocations]
    if allocations:
        draw_grid(screen, allocation_grid(run, allocations, unit))
    draw_list(screen, "Warnings", run.warnings)
    draw_list(screen, "Not modelled", NOT_MODELLED)


def usage_grid(run: DryRun, unit: Unit) -> TextTable:
    """Return one row per GPU and process."""
    rows = [
        (
            process_name(process),
            f"cuda:{usage.device}",
            str(process.steps),
            format_number(usage.allocated_bytes, unit),
            format_number(usage.reserved_bytes, unit),
            format_number(usage.device_bytes, unit),
            format_number(run.gpu.usable_bytes - usage.device_bytes, unit),
        )
        for process in run.processes
        for usage in process.usages
    ]
    columns = (Column("process"), Column("GPU"), Column("steps", right=True))
    return TextTable("Peaks", (*columns, *numeric(f"allocated {unit}", "reserved", "device", "free")), rows)


def process_name(process: PythonProcess) -> str:
    """Its rank, or its process id."""
    return f"process {process.number}" if process.rank is None else f"rank {process.rank}"


def verdict(run: DryRun, unit: Unit) -> str:
    """One sentence."""
    usable = f"{format_bytes(run.gpu.usable_bytes, unit)} usable on {run.gpu.name}"
    if run.ran_out:
        return f"DOES NOT FIT: the run exceeds the {usable}."
    peak = run.peak
    if peak is None:
        return f"NOTHING MEASURED: {run.doubt}."
    context = f"{format_bytes(run.gpu.context_bytes, unit)} for the context and loaded kernels"
    included = (
        f"{context} included"
        if not peak.communication_bytes
        else (f"{context} and {format_bytes(peak.communication_bytes, unit)} for NCCL included")
    )
    spare = run.gpu.usable_bytes - peak.device_bytes
    figures = (
        f"{format_bytes(peak.device_bytes, unit)} ({included}) of the {usable}; "
        f"{format_bytes(abs(spare), unit)} {'free' if spare >= 0 else 'over'}."
    )
    if run.fits is None:
        return f"CANNOT SAY: {run.doubt}. Until then it held at most {figures}"
    word = "FITS" if run.fits else "DOES NOT FIT"
    return f"{word}{'' if run.outcome in WHOLE else ', before it ended'}: {figures}"


def _smallest_gpus(run: DryRun) -> str:
    names = [gpu.name for gpu in run.would_fit]
    more = f" and {len(names) - SMALLEST} larger ones" if len(names) > SMALLEST else ""
    return f"GPUs with enough memory: {', '.join(names[:SMALLEST])}{more}."


def allocation_grid(run: DryRun, allocations: Iterable[Allocation], unit: Unit) -> TextTable:
    """Return the lines of the program that allocate most at the peak of the GPU that needs most."""
    peak = run.peak
    mine = [a for a in allocations if peak is not None and (a.process, a.device) == (peak.process, peak.device)]
    rows = [
        (format_number(allocation.bytes, unit), f"{allocation.count:,}", allocation.location)
        for allocation in sorted(mine, key=lambda allocation: -allocation.bytes)[:SHOWN]
    ]
    columns = (*numeric(unit, "tensors"), Column("line", wrap=True))
    return TextTable("Largest at the peak", columns, rows)


def draw_sweep(screen: Screen, found: Sweep, unit: Unit) -> None:
    """Draw one line per micro-batch size, and the result."""
    rows = [
        (
            str(size),
            run.outcome,
            format_number(run.allocated_bytes, unit),
            format_number(run.reserved_bytes, unit),
            format_number(run.device_bytes, unit),
            "-" if run.headroom_bytes is None else format_number(run.headroom_bytes, unit),
        )
        for size, run in found.runs
    ]
    columns = (
        Column(found.flag, right=True),
        Column("outcome"),
        *numeric(f"allocated {unit}", "reserved", "device", "free"),
    )
    draw_grid(screen, TextTable(f"Micro-batch sizes on {found.gpu.label}", columns, rows))
    if found.largest is None:
        draw_line(screen, "NONE FITS.", 2, BAD)
    else:
        draw_line(screen, f"LARGEST THAT FITS: {found.flag} {found.largest}.", 2, GOOD)
