"""Reserved memory by pool: in use, waiting, split, or releasable."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memcalc.allocator.fragmentation import PoolUse
from memcalc.report.labels import percent, plural
from memcalc.report.screen import Column, TextTable, numeric
from memcalc.units import Unit, format_bytes, format_number

_LINES: tuple[tuple[str, Callable[[PoolUse], int], str], ...] = (
    ("requested", lambda use: use.requested, "requested by tensors"),
    ("rounding", lambda use: use.rounding, "block rounding and unsplit remainders"),
    ("waiting", lambda use: use.waiting, "freed, but another stream may still use it"),
    ("split", lambda use: use.split, "free, next to blocks in use: inactive_split_bytes"),
    ("releasable", lambda use: use.releasable, "free; empty_cache() releases it"),
)


def fragmentation_grids(uses: Sequence[PoolUse], unit: Unit, when: str = "at the peak") -> list[TextTable]:
    """Return the parts of reserved memory for each pool, and by stream if there are several."""
    if not uses:
        return []
    pools = [pool for pool in ("small", "large") if any(use.pool == pool for use in uses)]

    def row(name: str, value: Callable[[PoolUse], int], text: str) -> tuple[str, ...]:
        sizes = [sum(value(use) for use in uses if use.pool == pool) for pool in pools]
        return (name, *(format_number(size, unit) for size in [*sizes, sum(sizes)]), text)

    rows = [row(*line) for line in _LINES]
    rows.append(row("reserved", lambda use: use.reserved, f"in {plural(sum(u.segments for u in uses), 'segment')}"))
    largest = [max(use.largest_free for use in uses if use.pool == pool) for pool in pools]
    cells = (format_number(size, unit) for size in [*largest, max(largest)])
    rows.append(("largest free", *cells, "largest request that needs no new segment"))
    columns = (Column(""), *(Column(f"{pool} pool", right=True) for pool in pools), Column("all", right=True))
    title = f"Reserved memory {when}, {unit}: {_sentence(uses, unit)}"
    grids = [TextTable(title, (*columns, Column("", wrap=True)), rows, frozenset({len(_LINES)}))]
    return [*grids, _streams(uses, unit)] if len({use.stream for use in uses}) > 1 else grids


def _sentence(uses: Sequence[PoolUse], unit: Unit) -> str:
    reserved = sum(use.reserved for use in uses)
    idle = reserved - sum(use.allocated for use in uses)
    return f"{format_bytes(idle, unit)} ({percent(idle, reserved)}) not allocated"


def _streams(uses: Sequence[PoolUse], unit: Unit) -> TextTable:
    """Streams never share free memory, so each has its own."""
    rows = [
        (
            f"{use.pool}, stream {use.stream}",
            f"{use.segments:,}",
            *(format_number(size, unit) for size in (use.reserved, use.allocated, use.waiting, use.free)),
        )
        for use in uses
    ]
    return TextTable(
        f"By stream, {unit}", (Column("pool"), *numeric("segments", "reserved", "allocated", "waiting", "free")), rows
    )
