"""The parameters by module, as model papers print them."""

from __future__ import annotations

from memcalc.layout.parameters import parameter_table
from memcalc.report.grid import Column, TextTable
from memcalc.spec.model import ModelSpec


def parameter_grid(model: ModelSpec) -> TextTable:
    """Return module, shape, parameters, number of layers and total of each row; the last row is the model's count."""
    table = parameter_table(model)
    rows = [
        (
            f"{row.module}.{row.tensor}",
            f"[{', '.join(str(size) for _, size in row.shape)}]",
            f"{row.elements:,}",
            f"{row.count:,}",
            f"{row.total:,}",
        )
        for row in table
    ]
    rows.append(("all parameters", "", "", "", f"{sum(row.total for row in table):,}"))
    columns = (Column("module", wrap=True), Column("shape", wrap=True))
    numbers = (Column("parameters", right=True), Column("×", right=True), Column("total", right=True))
    return TextTable("Parameters by module", (*columns, *numbers), rows, frozenset({len(rows) - 1}))
