"""`memcalc sweep --by trace|null|dry-run`: a grid of runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc.cli.trace_output import reject_options
from memcalc.errors import InputError
from memcalc.files import write_json, write_text
from memcalc.units import Unit, format_bytes

if TYPE_CHECKING:
    from memcalc.cells.cell import GridCell, GridCells
    from memcalc.cells.cell_sweep import Told

TABLES = (".csv", ".json")


def of_runs(options: Mapping[str, Any]) -> None:
    """Refuse options of runs where nothing is run.

    Raises:
        InputError: one was given.
    """
    given = {_option(name): value for name, value in options.items() if name != "gpus" or value != 1}
    reject_options(given, "of runs", "formulas run nothing", "Add --by trace, null or dry-run.")


def of_formulas(options: Mapping[str, Any], outputs: Sequence[Path]) -> None:
    """Refuse options of formulas, and files that cells cannot be written to, before anything is run.

    Raises:
        InputError: there is one.
    """
    from memcalc.report.plots.files import check_place

    reject_options(
        {_option(name): value for name, value in options.items()},
        "of --by formulas",
        "--by trace, null and dry-run run each cell",
    )
    for path in outputs:
        check_place(path, TABLES)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run_cells(
    by: str,
    words: Sequence[str],
    vary: Sequence[str],
    overrides: Sequence[str],
    gpu: str | None,
    *,
    file: Path,
    traced: Mapping[str, Any],
    dry: Mapping[str, Any],
    place: Mapping[str, Any],
) -> GridCells:
    """Run the cells of a grid, with progress on standard error.

    Args:
        by: "trace", "null" or "dry-run".
        words: the configuration, or the command.
        vary: texts of --vary.
        overrides: texts of --set.
        gpu: of all cells.
        file: in which they are kept.
        traced: options of traces.
        dry: options of dry runs.
        place: where they run.
    """
    from memcalc import api
    from memcalc.sweeping.vary_option import parse_axes, parse_values

    options: dict[str, Any] = {"cells": file, "gpu": gpu, **place}
    with _told(file) as tell:
        if by == "dry-run":
            reject_options(
                {"--set": overrides, "--python": traced["python"]},
                "of traces",
                "--by dry-run runs a command",
            )
            return api.sweep_command(words, parse_values(vary), tell=tell, **options, **dry)
        one = single(words)
        given = {_option(name): value for name, value in dry.items() if name not in ("steps", "gpus")}
        reject_options(given | {"--gpus": dry["gpus"] != 1}, "of a command", f"{one} is a configuration")
        named = {name: value for name, value in traced.items() if value is not None}
        return api.sweep_runs(one, parse_axes(vary), *overrides, by=by, tell=tell, **options, **named)


def single(words: Sequence[str]) -> str:
    """Return the configuration of a sweep.

    Raises:
        InputError: there are more words.
    """
    if len(words) > 1:
        raise InputError(
            f"a sweep takes one configuration, not {len(words)}.",
            "Name one configuration, or add --by dry-run to sweep a command.",
            "CONFIG",
        )
    return words[0]


@contextmanager
def _told(file: Path) -> Iterator[Told]:
    """Progress: a bar on a terminal, else a line for each cell; where an interrupted sweep can go on."""
    from memcalc.report.progress import shown_progress

    last = (0, 0)

    def line(cell: GridCell | None, done: int, total: int) -> None:
        nonlocal last
        last = (done, total)
        progress("cells", done, total)
        if not sys.stderr.isatty() and cell is not None and cell.answer is not None:
            answer = cell.answer
            size = "" if answer.device_bytes is None else f", {format_bytes(answer.device_bytes, 'GiB')}"
            sys.stderr.write(f"{done} of {total}: {cell.label}: {answer.outcome}{size}\n")

    with shown_progress() as progress:
        try:
            yield line
        except KeyboardInterrupt:
            sys.stderr.write(
                f"Interrupted: {last[0]} of {last[1]} cells are in {file}. Repeat the command to resume.\n"
            )
            raise


def show_cells(cells: GridCells, file: Path, form: str, unit: Unit, outputs: Sequence[Path], *, listed: bool) -> None:
    """Print the cells as a table, JSON or CSV, and write them to files."""
    from memcalc.cli.output import WrittenFiles, print_json, print_text
    from memcalc.documents.cells import cells_document
    from memcalc.report.screen import make_screen
    from memcalc.report.screens.cells import cells_csv, draw_cells

    files = WrittenFiles()
    for path in outputs:
        with files.writing():
            if path.suffix.lower() == ".json":
                write_json(path, cells_document(cells))
            else:
                write_text(path, cells_csv(cells) + "\n")
    if form == "json":
        print_json(cells_document(cells))
    elif form == "csv":
        print_text(cells_csv(cells))
    else:
        draw_cells(make_screen(), cells, str(file), unit, listed=listed)
    if cells.unkept is not None:
        raise cells.unkept
    files.complain()
