"""The screen of `replay` for a snapshot: agreement of the model with the real run, and composition of its memory."""

from __future__ import annotations

from memcalc.replaying import ReplayComparison
from memcalc.report.labels import label, percent, plural
from memcalc.report.plots.palette import UNATTRIBUTED
from memcalc.report.screen import Column, Screen, TextTable, draw_grid, draw_line, numeric
from memcalc.snapshots.composition import Composition
from memcalc.snapshots.verification import Verification
from memcalc.units import Unit, format_bytes, format_number

LINES = 12  # of the program, the largest


def draw_recording(screen: Screen, replay: ReplayComparison, unit: Unit) -> None:
    """Draw the part of the report that only snapshots have."""
    if replay.composition is None:
        return
    draw_line(screen, verification_text(replay.verification), 0, "bold")
    screen.line()
    for grid in composition_grids(replay.composition, unit):
        draw_grid(screen, grid)
    draw_line(screen, unused_text(replay.composition, unit), 0)
    screen.line()


def truncation_text(replay: ReplayComparison) -> str:
    """Return the missing parts of a truncated file; "" for a complete file."""
    recorded = replay.source.recorded
    if recorded is None or not recorded.snapshot.lacks:
        return ""
    recording, lacks = recorded.recording, recorded.snapshot.lacks
    left = {
        "segments": f"all segments but the first {len(recording.segments):,}",
        "device_traces": f"the history after its first {len(recording.entries):,} entries",
        "allocator_settings": "the allocator's settings (name them with --alloc-conf)",
        "external_annotations": "the marks of steps",
    }
    if not recording.is_cut:
        left["device_traces"] = "history of other devices"
    elif not recording.entries:
        left["device_traces"] = "the history"
    parts = [left[part] for part in lacks]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"THE FILE IS TRUNCATED. Missing: {listed}. The report covers the rest."


def verification_text(found: Verification | None) -> str:
    """Whether the model made what the real run made."""
    if found is None:
        return (
            "Not checked against the recording: neither the blocks in use before its history nor its end are known. "
            "Blocks allocated earlier and not freed in the remaining history are missing."
        )
    rules = f"with the rules of torch {found.version}"
    if found.agrees:
        return (
            f"Checked against the recording, {rules}: over {found.entries:,} entries the model allocated, freed and "
            f"kept the same {found.segments:,} segments, with every block at its address."
        )
    start = "" if found.from_start else " The history does not begin with the first allocation."
    return f"The model differs from the recording, {rules}, {found.difference}.{start}"


def composition_grids(found: Composition, unit: Unit) -> list[TextTable]:
    """Components, lines of the program, and leaks."""
    whole = found.peak_bytes
    rows = [
        (label(kind) if kind is not None else UNATTRIBUTED, format_number(size, unit), percent(size, whole))
        for kind, size in sorted(found.by_component.items(), key=lambda item: -item[1])
    ]
    rows.append(("requested", format_number(whole, unit), "100.0%"))
    columns = (Column("component"), *numeric(unit, "share"))
    title = f"Memory at the highest requested bytes: {format_bytes(whole, unit)}"
    grids = [TextTable(title, columns, rows, frozenset({len(rows) - 1}))]
    lines = [
        (
            format_number(line.bytes, unit),
            f"{line.tensors:,}",
            format_number(line.largest, unit),
            label(line.component) if line.component is not None else UNATTRIBUTED,
            line.location,
        )
        for line in found.lines[:LINES]
    ]
    heads = numeric(unit, "tensors", "largest")
    grids.append(TextTable("By line of the program", (*heads, Column("component"), Column("line", wrap=True)), lines))
    if found.leaks:
        leaks = [
            (format_number(leak.bytes, unit), f"{leak.tensors:,}", f"{leak.steps:,}", leak.location)
            for leak in found.leaks
        ]
        heads = numeric(unit, "tensors", "steps")
        grids.append(TextTable("Not freed by the next step: leaks", (*heads, Column("line", wrap=True)), leaks))
    return grids


def unused_text(found: Composition, unit: Unit) -> str:
    """Return sentences on unused reserved memory at the end, and on leaks."""
    idle = found.reserved_bytes - found.allocated_bytes
    text = (
        f"At the end {format_bytes(found.reserved_bytes, unit)} are reserved, {format_bytes(idle, unit)} of them not "
        f"allocated, {format_bytes(found.inactive_split_bytes, unit)} of these in split segments; blocks are "
        f"{format_bytes(found.rounding_bytes, unit)} larger than requested."
    )
    if found.steps > 2:
        return text if found.leaks else f"{text} No line leaks tensors ({found.steps} steps)."
    return f"{text} The history has {plural(found.steps, 'optimizer step')}: finding leaks needs three."
