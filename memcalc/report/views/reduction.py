"""Views with less detail, for reports that must stay small, and the line that lists what is omitted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import chain, pairwise
from typing import Any

View = dict[str, Any]
Section = dict[str, Any]
# After each change of a view: the type of detail that is omitted, and the text about it.
Steps = Iterator[tuple[str, str]]

CHUNKS = 8  # timelines and runs are omitted in as many parts, the last ones first
POINTS = (300, 150, 75, 40)  # of each timeline
ROWS = (1000, 300, 100, 30, 10)  # of each table and list


def reductions(view: View) -> Iterator[View]:
    """Yield the view, then with less and less detail.

    Omitted, in this order: timelines of runs that fit with much memory free; points of the other timelines; formulas
    and tensors; the other timelines; all runs; rows of tables and lists. The last runs go first.
    """
    yield view
    view = deepcopy(view)
    omitted: dict[str, str] = {}
    for what, text in chain(
        _drop_timelines([each for each in _views(view) if each.get("comfortable")], "that fit with much memory free"),
        _thin_step_by_step(view),
        _drop_formulas(view),
        _drop_timelines([*_views(view)], ""),
        _drop_runs(_sections(view, "views")),
        _drop_rows([*_sections(view, "table"), *_sections(view, "list")]),
    ):
        omitted[what] = text
        line = {"text": f"Omitted to keep this file small: {'; '.join(omitted.values())}.", "indent": 0, "style": "dim"}
        yield view | {"sections": [{"kind": "lines", "lines": [line]}, *view["sections"]]}


def thin_timelines(sections: Iterable[Section], most: int) -> None:
    """Merge the points of each timeline until at most `most` are left; the peaks stay."""
    for section in sections:
        if section["kind"] == "timeline":
            _thin(section["document"]["points"], most)


def _has_timeline(view: View) -> bool:
    return any(section["kind"] == "timeline" for section in view["sections"])


def _drop_timelines(views: list[View], which: str) -> Steps:
    found = [each for each in views if _has_timeline(each)]
    size = max(-(-len(found) // CHUNKS), 1)
    for end in range(len(found), 0, -size):
        for each in found[max(end - size, 0) : end]:
            each["sections"] = [section for section in each["sections"] if section["kind"] != "timeline"]
        yield f"timelines {which}", f"timelines of {len(found) - max(end - size, 0)} runs {which}".strip()


def _thin_step_by_step(view: View) -> Steps:
    sections = _sections(view, "timeline")
    for most in POINTS if sections else ():
        thin_timelines(sections, most)
        yield "points", f"timeline points, all but {most} per run"


def _drop_formulas(view: View) -> Steps:
    rows = [row for section in _sections(view, "components") for row in section["rows"]]
    held: list[tuple[dict[str, Any], str, Any]] = [(each, "formulas", {}) for each in _sections(view, "timeline")]
    held += [(row, "groups", []) for row in rows]
    found = [(each, name, nothing) for each, name, nothing in held if each[name]]
    for each, name, nothing in found:
        each[name] = nothing
    if found:
        yield "formulas", "tensors and formulas"


def _drop_runs(sections: list[Section]) -> Steps:
    dropped = 0
    for section in sections:
        views = section["views"]
        step = max(-(-len(views) // CHUNKS), 1)
        while views:
            dropped += len(views[-step:])
            del views[-step:]
            yield "runs", f"details of {dropped} runs"


def _drop_rows(sections: list[Section]) -> Steps:
    for most in ROWS:
        for section in sections:
            for name in section.keys() & {"rows", "items", "shares"}:
                section[name] = section[name][:most]
            if "strong" in section:
                section["strong"] = [row for row in section["strong"] if row < most]
        yield "rows", f"rows of tables and lists after the first {most}"


def _views(view: View) -> Iterator[View]:
    """Yield the view and all views in it, in their order."""
    yield view
    for section in view["sections"]:
        for inner in section.get("views", ()):
            yield from _views(inner)


def _sections(view: View, kind: str) -> list[Section]:
    return [section for each in _views(view) for section in each["sections"] if section["kind"] == kind]


def _thin(points: dict[str, Any], most: int) -> None:
    """Merge points until at most `most` are left; each is the peak of those that it replaces."""
    count = len(points["begin"])
    bounds = [count * part // most for part in range(most + 1)] if count > most else [*range(count + 1)]
    parts = [range(begin, end) for begin, end in pairwise(bounds)]
    allocated, reserved = points["allocated_bytes"], points["reserved_bytes"]
    highest = [max(part, key=allocated.__getitem__) for part in parts]
    points["begin"] = [points["begin"][part[0]] for part in parts]
    points["event"] = [points["event"][at] for at in highest]
    points["allocated_bytes"] = [allocated[at] for at in highest]
    if reserved is not None:
        points["reserved_bytes"] = [max(reserved[part[0] : part[-1] + 1]) for part in parts]
    components = points["component_bytes"]
    points["component_bytes"] = {name: [sizes[at] for at in highest] for name, sizes in components.items()}
