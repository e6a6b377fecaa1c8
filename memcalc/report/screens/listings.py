"""Lists of presets, of published models and of GPUs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

from memcalc.catalogue.shipped import CatalogueEntry
from memcalc.layout.parameters import count_parameters
from memcalc.report.labels import count
from memcalc.report.screen import Column, TextTable, numeric
from memcalc.spec.hardware.gpus import all_gpus
from memcalc.spec.loading import load
from memcalc.spec.model_families.conversion import has_family_formulas, known_families
from memcalc.spec.model_families.multimodal import language_config
from memcalc.spec.presets import preset_names
from memcalc.spec.towers import TOWERS
from memcalc.units import Unit, format_number


def model_rows() -> list[dict[str, Any]]:
    """Every preset with its sizes."""
    rows = []
    for name in preset_names():
        model = load(name).model
        rows.append(
            {
                "name": name,
                "parameters": count_parameters(model),
                "num_layers": model.num_layers,
                "hidden_size": model.hidden_size,
                "num_attention_heads": model.num_attention_heads,
                "num_key_value_heads": model.num_key_value_heads,
                "vocab_size": model.vocab_size,
                "num_experts": 0 if model.moe is None else model.moe.num_experts,
            }
        )
    return rows


def model_grid(rows: list[dict[str, Any]]) -> TextTable:
    """Return the presets as a table; key/value heads and experts only if they differ from the plain case."""
    cells = [
        (
            row["name"],
            count(row["parameters"]),
            str(row["num_layers"]),
            f"{row['hidden_size']:,}",
            str(row["num_attention_heads"]),
            str(row["num_key_value_heads"]),
            f"{row['vocab_size']:,}",
            str(row["num_experts"] or "-"),
        )
        for row in rows
    ]
    heads = ("parameters", "l", "d", "h", "kv heads", "V", "experts")
    return TextTable("", (Column("preset"), *numeric(*heads)), cells)


def family_list() -> str:
    """Return the model families with formulas."""
    text = f"Families (model_type) with formulas: {', '.join(known_families())}."
    return "\n".join(textwrap.wrap(text, 100))


def gpu_rows() -> list[dict[str, Any]]:
    """Return every GPU with its memory."""
    return [
        {
            "name": gpu.name,
            "label": gpu.label,
            "advertised_bytes": gpu.advertised_bytes,
            "smi_bytes": gpu.smi_bytes,
            "usable_bytes": gpu.usable_bytes,
            "source": gpu.source,
        }
        for gpu in all_gpus()
    ]


def gpu_table(rows: list[dict[str, Any]], unit: Unit) -> TextTable:
    """Return the GPUs as a table."""
    cells = [
        (
            row["name"],
            row["label"],
            format_number(row["advertised_bytes"], unit),
            "-" if row["smi_bytes"] is None else format_number(row["smi_bytes"], unit),
            format_number(row["usable_bytes"], unit),
        )
        for row in rows
    ]
    return TextTable(
        "", (Column("GPU"), Column("", wrap=True), *numeric(f"sold as {unit}", "nvidia-smi", "usable")), cells
    )


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
