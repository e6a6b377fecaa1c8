"""The report of `replay`: what a run needs of the device under an allocator, and what other settings would save."""

from __future__ import annotations

from memcalc.allocator.fragmentation import pool_uses
from memcalc.allocator.result import CounterSample, ReplayResult
from memcalc.replaying import ReplayComparison, Trial
from memcalc.report.labels import percent, plural
from memcalc.report.plots.text_chart import draw_curve
from memcalc.report.screen import BAD, GOOD, UNSURE, Column, Screen, TextTable, draw_grid, draw_line, draw_list, numeric
from memcalc.report.screens.snapshot import draw_recording, truncation_text
from memcalc.report.tables.address_space import draw_address_space
from memcalc.report.tables.fragmentation import fragmentation_grids
from memcalc.units import Unit, format_bytes, format_number


def draw_replay(screen: Screen, replay: ReplayComparison, unit: Unit) -> None:
    """Draw the screen of `memcalc replay`."""
    result = replay.result
    screen.line((subject(replay), "bold"))
    draw_line(screen, verdict(replay, unit), 2, BAD if replay.failed else GOOD)
    if cut := truncation_text(replay):
        draw_line(screen, cut, 2, UNSURE)
    screen.line()
    draw_grid(screen, figures_grid(replay, unit))
    draw_curve(screen, replay.curve, unit, rows=8)
    draw_address_space(screen, replay.segments, replay.owners, unit, shown_point_text(replay))
    for grid in fragmentation_grids(pool_uses(replay.segments), unit, shown_point_text(replay)):
        draw_grid(screen, grid)
    if len(replay.trials) > 1:
        draw_grid(screen, trials_grid(replay, unit))
        draw_line(screen, advice(replay, unit), 2, "bold")
        screen.line()
    draw_recording(screen, replay, unit)
    draw_list(screen, "Settings", result.notes)
    draw_list(screen, "Not tried", (f"{named(trial)}: {trial.refused}" for trial in replay.trials if trial.refused))


def subject(replay: ReplayComparison) -> str:
    """ "run.jsonl (1,204 events) through pytorch, max_split_size_mb:128, on NVIDIA H100 80GB HBM3"."""
    events = plural(len(replay.source.events), "event")
    gpu = f", on {replay.gpu.label}" if replay.gpu else ""
    return f"{replay.source.name} ({events}) through {named(replay.trials[0])}{gpu}"


def named(trial: Trial) -> str:
    """Return the allocator with its settings."""
    return f"{trial.policy}, {trial.config}" if trial.config else f"{trial.policy}, default settings"


def verdict(replay: ReplayComparison, unit: Unit) -> str:
    """One sentence."""
    result = replay.result
    if result.failure:
        first = result.failure.message.strip().partition("\n")[0]
        return f"RUNS OUT OF MEMORY at {place(result.failure.event, replay)}: {first}"
    needs = f"{format_bytes(result.peak_reserved, unit)} reserved"
    if replay.gpu is None:
        return f"Reserves up to {needs.removesuffix(' reserved')} on a device of unlimited size."
    room = replay.gpu.usable_bytes - replay.gpu.context_bytes
    spare = format_bytes(room - result.peak_device, unit)
    context = format_bytes(replay.gpu.context_bytes, unit)
    return f"FITS: {needs} at most, {context} for the context and loaded kernels; {spare} free."


def place(event: int, replay: ReplayComparison) -> str:
    """Return a position in the stream, with its phase and request."""
    phase = replay.curve.phase_of(event)
    events = replay.curve.timeline.events
    line = events[event].line if event < len(events) else ""
    return f"event {event:,}{f' in {phase}' if phase else ''}{f' ({line})' if line else ''}"


def shown_point_text(replay: ReplayComparison) -> str:
    """Which moment the pictures show."""
    return "when it runs out" if replay.failed else "when most is reserved"


def figures_grid(replay: ReplayComparison, unit: Unit) -> TextTable:
    """Allocated, reserved and fragmentation at the two peaks and at the end."""
    result = replay.result
    moments = {
        "most allocated": result.peak_allocated_sample,
        "most reserved": result.peak_reserved_sample,
        "the end": result.end,
    }
    if replay.failed:
        moments["the last"] = moments.pop("the end")
    rows = [_point_row(name, moment, unit) for name, moment in moments.items()]
    fetched, returned = result.device_allocations, result.device_frees
    calls = f"{plural(fetched, 'segment')} allocated, {returned:,} freed"
    return TextTable(
        f"Peaks; {calls}",
        (Column("point"), *numeric("event", f"requested {unit}", "allocated", "reserved", "split", "fragmented")),
        rows,
    )


def _point_row(name: str, sample: CounterSample, unit: Unit) -> tuple[str, ...]:
    sizes = (sample.requested, sample.allocated, sample.reserved, sample.inactive_split)
    return (
        name,
        f"{max(sample.event, 0):,}",
        *(format_number(size, unit) for size in sizes),
        percent(sample.unallocated, sample.reserved),
    )


def trials_grid(replay: ReplayComparison, unit: Unit) -> TextTable:
    """Compare allocators and settings."""
    rows: list[tuple[str, ...]] = []
    strong: set[int] = set()
    for number, trial in enumerate(replay.trials):
        if trial.result is not None:
            if replay.recommendation and trial is replay.recommendation.trial:
                strong.add(len(rows))
            rows.append(_trial_row(number, trial, trial.result, unit))
    columns = (
        Column("allocator, settings", wrap=True),
        *numeric(f"allocated {unit}", "reserved", "idle", "share", "calls"),
        Column("outcome"),
    )
    return TextTable("Allocators and settings, each at its own peaks; driver calls", columns, rows, frozenset(strong))


def _trial_row(number: int, trial: Trial, result: ReplayResult, unit: Unit) -> tuple[str, ...]:
    idle = result.peak_reserved - result.peak_allocated
    return (
        f"{trial.policy}, {trial.config}".removesuffix(", "),
        format_number(result.peak_allocated, unit),
        format_number(result.peak_reserved, unit),
        format_number(idle, unit),
        percent(idle, result.peak_reserved),
        f"{result.device_allocations + result.device_frees:,}",
        f"out at {result.failure.event:,}" if result.failure else "requested" if number == 0 else "runs",
    )


def advice(replay: ReplayComparison, unit: Unit) -> str:
    """Return the recommended setting and the memory that this setting saves."""
    found = replay.recommendation
    if found is None:
        if replay.failed:
            return "None of these settings makes it fit: the run must request less memory."
        return "The requested settings are the best of these."
    setting = found.trial.config or "the default settings"
    if found.saved_bytes is None:
        assert found.trial.result is not None
        reserved = format_bytes(found.trial.result.peak_reserved, unit)
        return f"Recommended: {setting}: the run fits, with {reserved} reserved."
    return f"Recommended: {setting}: saves {format_bytes(found.saved_bytes, unit)} of reserved memory."
