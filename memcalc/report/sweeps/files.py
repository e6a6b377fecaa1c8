"""A sweep for other programs: CSV, JSON, and Parquet where pyarrow is installed. Bytes are whole numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memcalc.documents.sweep import columns, sweep_document
from memcalc.errors import Unavailable
from memcalc.extras import installation
from memcalc.files import write_json, write_text, writing
from memcalc.report.csv_text import csv_text
from memcalc.report.plots.files import check_place
from memcalc.report.sweeps.svg import heat_map_page, heat_maps
from memcalc.sweeping.grid import written
from memcalc.sweeping.table import Table
from memcalc.units import Unit

TABLES = (".csv", ".json", ".parquet")
PICTURES = (".svg", ".html")


def sweep_csv(table: Table) -> str:
    """One line a configuration, without a final line break."""
    found = columns(table)
    rows = zip(*found.values(), strict=True)
    return csv_text(found, (["" if value is None else written(value) for value in row] for row in rows))


def check_output(path: Path) -> None:
    """Refuse a file that nothing could write, before time is spent on it.

    Raises:
        InputError: for an unknown suffix, or a missing directory.
        Unavailable: pyarrow is needed and not installed.
    """
    check_place(path, TABLES)
    if path.suffix.lower() == ".parquet":
        _pyarrow()


def write_output(path: Path, table: Table, name: str, notes: tuple[str, ...] = ()) -> None:
    """Write the table in the format of the file's suffix."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        arrow, parquet = _pyarrow()
        arrays = {name: arrow.array(_plain(values), _type(name, arrow)) for name, values in columns(table).items()}
        with writing(path) as file:
            parquet.write_table(arrow.table(arrays), file)
    elif suffix == ".json":
        write_json(path, sweep_document(table, name, notes))
    else:
        write_text(path, sweep_csv(table) + "\n")


def write_heatmaps(path: Path, table: Table, title: str, unit: Unit) -> None:
    """Write the maps: .svg, or .html."""
    draw = heat_map_page if path.suffix.lower() == ".html" else heat_maps
    write_text(path, draw(table, title, unit))


def _plain(values: list[Any]) -> list[Any]:
    """Return a column with values of one type: strings if a field has numbers and words, or lists."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) > 1 or kinds & {list, tuple}:
        numbers = kinds <= {int, float}
        return values if numbers else [None if value is None else written(value) for value in values]
    return values


def _type(name: str, arrow: Any) -> Any:
    """Return the type of a column, which also holds for an empty column; None: the type of its values."""
    if name in ("valid", "fits", "replayed", "on_front"):
        return arrow.bool_()
    if name in ("verdict", "peak_phase", "reason"):
        return arrow.string()
    return arrow.int64() if name.endswith("_bytes") or name == "pipeline_stage" else None


def _pyarrow() -> tuple[Any, Any]:
    from importlib import import_module

    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise Unavailable(
            f"Parquet needs pyarrow, which is not installed. Run: {installation('parquet')}. CSV and JSON need nothing."
        ) from None
