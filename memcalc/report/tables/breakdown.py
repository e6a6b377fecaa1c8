"""Components at the peak: a bar and the table that is its legend."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.ledger.result import Sizing
from memcalc.report.labels import HEADROOM, REST, label, letter, meaning, percent, rank_text
from memcalc.report.screen import Column, TextTable, letter_bar, numeric
from memcalc.units import Unit, format_bytes, format_number

_MOST_NAMED = 2
_NAMED = 0.01  # of the allocated peak: components from which on the row of those shown together names them
_TINY = 0.001  # of the allocated peak: components below it are shown together, where a table is short


class Breakdown(NamedTuple):
    """The parts of a peak, in bytes."""

    inside: dict[str, int]  # components; their sum is the allocated peak
    outside: dict[str, int]  # what else the process holds on the device; empty where that is not known
    headroom: int | None
    rest: tuple[str, ...] = ()  # components that are shown together, of those that are not tiny, the largest first


def breakdown(result: Sizing) -> Breakdown:
    """Return the peak of the headline rank by component, with memory outside the allocated blocks."""
    headline, ledger = result.headline, result.ledger
    outside = headline.outside
    around = {
        "cached_segments": outside.cached_segments,
        "device_context": outside.device_context,
        "communication_library": outside.communication_library,
    }
    return Breakdown(
        {component.value: size for component, size in ledger.components(ledger.peak_phase).items()},
        {name: size for name, size in around.items() if size and headline.device_bytes is not None},
        result.headroom_bytes,
    )


def folded(parts: Breakdown, most: int) -> Breakdown:
    """Return a breakdown with at most `most` components, the small ones together as one."""
    whole = sum(parts.inside.values())
    kept = [name for name, size in parts.inside.items() if size >= _TINY * whole]
    kept = sorted(kept, key=lambda name: -parts.inside[name])[: most - 1]
    if len(parts.inside) - len(kept) < 2:
        return parts
    inside = {name: size for name, size in parts.inside.items() if name in kept}
    rest = sorted((name for name in parts.inside if name not in inside), key=lambda name: -parts.inside[name])
    named = tuple(name for name in rest if parts.inside[name] >= _NAMED * whole)
    return parts._replace(inside=inside | {REST: whole - sum(inside.values())}, rest=named)


def bar_lines(result: Sizing, unit: Unit, width: int, parts: Breakdown | None = None) -> tuple[str, str]:
    """Return the bar, and a line that marks the usable GPU memory if the run needs more."""
    parts = breakdown(result) if parts is None else parts
    cells = [(letter(name), size) for name, size in (parts.inside | parts.outside).items()]
    if parts.headroom is not None and parts.headroom >= 0:
        return letter_bar([*cells, (HEADROOM, parts.headroom)], width), ""
    below = ""
    if result.limit_bytes is not None and parts.headroom is not None:
        needed = result.limit_bytes - parts.headroom
        at = min(width - 1, width * result.limit_bytes // needed)
        text = f"usable GPU memory: {format_bytes(result.limit_bytes, unit)}"
        below = f"{' ' * at}^ {text}" if at + 2 + len(text) <= width else f"{text} ^".rjust(at + 1)
    return letter_bar(cells, width), below


def host_grid(result: Sizing, unit: Unit) -> TextTable | None:
    """Return host memory of a rank by component; None if it is zero."""
    host = result.headline.host
    if host is None:
        return None
    rows = [
        (label(part.value), format_number(size, unit), percent(size, host.peak_bytes), meaning(part.value))
        for part, size in host.components(host.peak_phase).items()
    ]
    rows.append(
        ("host", format_number(host.peak_bytes, unit), "100.0%", "of one rank; a node needs this for each of its GPUs")
    )
    columns = (Column("component"), *numeric(unit, "share"))
    title = f"In host memory: {host.peak_phase}"
    return TextTable(title, (*columns, Column("description", wrap=True)), rows, frozenset({len(rows) - 1}))


def component_grid(result: Sizing, unit: Unit, parts: Breakdown | None = None) -> TextTable:
    """Return the components at the peak with their percentages; sums are bold."""
    parts = breakdown(result) if parts is None else parts
    allocated = sum(parts.inside.values())
    whole = allocated + sum(parts.outside.values())
    rows: list[tuple[str, ...]] = []
    strong: set[int] = set()

    def add(mark: str, name: str, size: int, text: str) -> None:
        rows.append((mark, name, format_number(size, unit), percent(size, whole), text))

    named = [label(name) for name in parts.rest[:_MOST_NAMED]]
    more = len(parts.rest) - len(named)
    folded_text = ", ".join(named) + (f", {more} more" if more else "")
    for name, size in parts.inside.items():
        add(letter(name), label(name), size, (name == REST and folded_text) or meaning(name))
    strong.add(len(rows))
    add("", "allocated", allocated, "")
    if parts.outside:
        for name, size in parts.outside.items():
            add(letter(name), label(name), size, meaning(name))
        strong.add(len(rows))
        add("", "device", whole, "")
    if parts.headroom is not None and parts.headroom >= 0:
        rows.append((HEADROOM, "headroom", format_number(parts.headroom, unit), "", "free GPU memory"))
    where = rank_text(result.headline.rank) if len(result.ranks) > 1 else ""
    title = f"At the peak: {result.ledger.peak_phase}{f', {where}' if where else ''}"
    columns = (Column(""), Column("component"), *numeric(unit, "share"))
    return TextTable(title, (*columns, Column("description", wrap=True)), rows, frozenset(strong), letters=True)
