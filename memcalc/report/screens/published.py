"""Published models of the catalogue: what a search found."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

from memcalc.catalogue.shipped import CatalogueEntry
from memcalc.report.grid import Column, TextTable
from memcalc.report.labels import count
from memcalc.spec.model_families.conversion import has_family_formulas, known_families
from memcalc.spec.model_families.multimodal import language_config
from memcalc.spec.towers import TOWERS

MOST_ROWS = 20  # of a search without --all


def published_rows(entries: Iterable[CatalogueEntry]) -> list[dict[str, Any]]:
    """Return one row per model, with where its figures were read and what its parameter count was compared with."""
    return [
        {
            "hub_id": entry.hub_id,
            "model_type": entry.hub_type or entry.config["model_type"],
            "kind": entry.model_class,
            "parameters": entry.parameters,
            "answered_by": _answered_by(entry),
            "verified": entry.verified,
            "check": entry.check,
            "source": entry.source,
        }
        for entry in entries
    ]


def _answered_by(entry: CatalogueEntry) -> str:
    """How a run of the model is estimated: "formulas", "formulas (language model)" or "trace"."""
    family = entry.config["model_type"]
    if family in known_families():
        return "formulas" if has_family_formulas(entry.config) else "trace"
    language = language_config(entry.config)
    if not language or not has_family_formulas(language):
        return "trace"
    return "formulas" if family in TOWERS else "formulas (language model)"


def published_grid(rows: list[dict[str, Any]]) -> TextTable:
    """Return the models as a table."""
    cells = [
        (row["hub_id"], count(row["parameters"]), row["model_type"], row["answered_by"].replace("formulas (", "("))
        for row in rows
    ]
    columns = (Column("hub id"), Column("parameters", right=True), Column("model_type"), Column("estimated by"))
    return TextTable("", columns, cells)


def search_summary(query: str, found: int, shown: int) -> str:
    """Return the sentence below the table."""
    if found == 0:
        text = f"No model of the catalogue has {query!r} in its hub id. Other models: name their config.json."
    elif shown < found:
        text = f"{shown} of {found} models shown; --all shows the others."
    else:
        text = f"{found} model{'s' if found > 1 else ''}. Estimate one with `memcalc estimate ORG/NAME`."
    return "\n".join(textwrap.wrap(text, 80, break_long_words=False, break_on_hyphens=False))
