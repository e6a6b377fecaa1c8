"""Lists of presets and of GPUs."""

from __future__ import annotations

import textwrap
from typing import Any

from memcalc.estimation.parameters import count_parameters
from memcalc.report.grid import Column, Grid
from memcalc.report.labels import count
from memcalc.spec.cards import all_cards
from memcalc.spec.families import known_families
from memcalc.spec.loading import load
from memcalc.spec.presets import preset_names
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


def model_grid(rows: list[dict[str, Any]]) -> Grid:
    """The presets as a table; key/value heads and experts only where they differ from the plain case."""
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
    return Grid("", (Column("preset"), *(Column(head, right=True) for head in heads)), cells)


def family_words() -> str:
    """Return the model families with formulas."""
    text = f"Families (model_type) with formulas: {', '.join(known_families())}."
    return "\n".join(textwrap.wrap(text, 100))


def card_rows() -> list[dict[str, Any]]:
    """Return every GPU with its memory."""
    return [
        {
            "name": card.name,
            "label": card.label,
            "advertised_bytes": card.advertised_bytes,
            "smi_bytes": card.smi_bytes,
            "usable_bytes": card.usable_bytes,
            "source": card.source,
        }
        for card in all_cards()
    ]


def card_grid(rows: list[dict[str, Any]], unit: Unit) -> Grid:
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
    heads = (f"sold as {unit}", "nvidia-smi", "usable")
    return Grid("", (Column("card"), Column("", wrap=True), *(Column(head, right=True) for head in heads)), cells)
