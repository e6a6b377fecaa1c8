"""Lists of presets and of GPUs."""

from __future__ import annotations

import textwrap
from typing import Any

from memcalc.layout.parameters import count_parameters
from memcalc.report.grid import Column, TextTable
from memcalc.report.labels import count
from memcalc.spec.hardware.gpus import all_gpus
from memcalc.spec.loading import load
from memcalc.spec.model_families.conversion import known_families
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
    return TextTable("", (Column("preset"), *(Column(head, right=True) for head in heads)), cells)


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
    heads = (f"sold as {unit}", "nvidia-smi", "usable")
    return TextTable("", (Column("GPU"), Column("", wrap=True), *(Column(head, right=True) for head in heads)), cells)
