"""Explanation of ledger rows (shape, formula with numbers, live phases, source), of parameters and of recipes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from memcalc.errors import InputError
from memcalc.layout.parameters import parameter_table
from memcalc.ledger.component import Component
from memcalc.ledger.result import Result
from memcalc.ledger.row import Row
from memcalc.report.labels import label, meaning
from memcalc.report.screen import Column, TextTable, numeric
from memcalc.spec.model import ModelSpec
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES, Recipe
from memcalc.spec.spec import Spec
from memcalc.units import Unit, format_bytes

ALL = "all"
PARAMETERS = "parameters"  # not a component: the table of the model's parameters by module
RECIPE = "recipe"  # not a component: the table of the recipes
EXPLAINABLE = (ALL, PARAMETERS, RECIPE, *(component.value for component in Component))


class ExplainedRow(NamedTuple):
    """One ledger row as text."""

    description: str  # "layers.*.attention.softmax  bf16 [1, 96, 2048, 2048] × 96"
    size: str
    formula: str


class RowGroup(NamedTuple):
    """Rows with the same live phases and source, largest first."""

    phases: str
    citation: str
    entries: list[ExplainedRow]


class ComponentSection(NamedTuple):
    """One component: its heading and its groups, largest first."""

    heading: str
    groups: list[RowGroup]


def explainable(word: str) -> str:
    """Return the component's name as the ledger spells it.

    Raises:
        InputError: when it names nothing that can be explained.
    """
    name = word.lower().replace("-", "_").replace(" ", "_")
    if name not in EXPLAINABLE:
        raise InputError(f"--explain {word[:60]}: unknown component.", f"Choose {', '.join(EXPLAINABLE)}.")
    return name


def chapters(result: Result, word: str, unit: Unit, *, at_peak: bool = False) -> Iterator[ComponentSection]:
    """Yield the chapters of `word` (a component, or "all"); those without a row only by name.

    Args:
        result: the result to explain.
        word: a component, or "all".
        unit: of memory.
        at_peak: only the rows that are live at the peak.
    """
    values = symbol_values(result)
    ledger = result.ledger
    sizes = ledger.components_by_phase[ledger.peak_phase]
    for component in Component:
        if word not in (ALL, component.value):
            continue
        rows = [row for row in ledger.rows if row.component is component]
        if at_peak:
            rows = [row for row in rows if ledger.peak_phase in row.phases]
        if not rows and word == ALL:
            continue
        heading = f"{label(component)}: {meaning(component)}; {_size(sizes.get(component, 0), unit)} at the peak"
        yield ComponentSection(heading, _groups(rows, ledger.phases, values, unit))


def _groups(rows: list[Row], phases: tuple[str, ...], values: dict[str, int], unit: Unit) -> list[RowGroup]:
    alike: dict[tuple[tuple[str, ...], str], list[Row]] = {}
    for row in rows:
        alike.setdefault((row.phases, row.citation), []).append(row)
    by_size = sorted(alike.items(), key=lambda item: -sum(row.bytes for row in item[1]))
    return [
        RowGroup(
            phase_runs(live, phases),
            citation,
            [_entry(row, values, unit) for row in sorted(members, key=lambda row: -row.bytes)],
        )
        for (live, citation), members in by_size
    ]


def _entry(row: Row, values: dict[str, int], unit: Unit) -> ExplainedRow:
    shape = ", ".join(str(size) for size in row.shape)
    many = f" × {row.count:,}" if row.count != 1 else ""
    each, rest = divmod(row.bytes, row.count) if row.count else (0, 0)
    numbers = None if rest else with_numbers(row.formula, values, each)
    formula = f"{row.formula} = {numbers}" if numbers else f"{row.formula}: {each:,}"
    return ExplainedRow(
        description=f"{row.module}.{row.tensor}  {row.dtype} [{shape}]{many}",
        size=_size(row.bytes, unit),
        formula=f"{formula} bytes{' each' if many else ''}",
    )


def row_formula(row: Row, values: dict[str, int]) -> str:
    """Return a row in one line: tensor and formula."""
    entry = _entry(row, values, "GiB")
    return f"{entry.description}: {entry.formula}"


def _size(size: int, unit: Unit) -> str:
    """Return a size in the unit, or in bytes if it would round to zero."""
    text = format_bytes(size, unit)
    return format_bytes(size, "bytes") if size and not text.strip("0., GMiBbytes") else text


def phase_runs(live: tuple[str, ...], phases: tuple[str, ...]) -> str:
    """Phases in a row as "first to last": "forward_1 to backward_1, forward_2 to backward_2"."""
    if len(live) == len(phases):
        return "always"
    runs: list[list[str]] = []
    previous = -2
    for index, phase in enumerate(phases):
        if phase not in live:
            continue
        if index == previous + 1:
            runs[-1].append(phase)
        else:
            runs.append([phase])
        previous = index
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs) or "never"


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
    return TextTable(
        "Parameters by module", (*columns, *numeric("parameters", "×", "total")), rows, frozenset({len(rows) - 1})
    )


def recipe_grid(spec: Spec) -> TextTable:
    """Return the bytes per parameter of every recipe under Adam, copy by copy; that of the run is bold."""
    dtype = spec.training.dtype
    rows = [
        (
            name,
            *_copies(recipe, dtype if name != "fp32" else "fp32"),
            str(recipe.textbook_bytes),
            recipe.imitates,
        )
        for name, recipe in RECIPES.items()
    ]
    columns = (Column("recipe"), *numeric("weights", "gradients", "in fp32", "master", "moments", "total"))
    strong = frozenset(number for number, name in enumerate(RECIPES) if name == spec.training.recipe)
    title = f"Recipes: bytes per parameter under Adam, in {dtype}"
    return TextTable(title, (*columns, Column("imitates", wrap=True)), rows, strong)


def _copies(recipe: Recipe, dtype: str) -> tuple[str, ...]:
    """Bytes of each copy of a parameter; "-": there is none."""

    def size(precision: str | None) -> str:
        if precision is None:
            return "-"
        return str(DTYPE_BYTES[dtype if precision == "compute" else precision])

    copies = (recipe.weights, recipe.gradients, recipe.main_gradients, recipe.master)
    moment = size(recipe.moments)
    return *map(size, copies), f"{moment} + {moment}"


MODULES_TEXT = (
    "plain modules: the papers' block in plain PyTorch; what autograd saves depends on the modules.",
    "transformers modules: Hugging Face's implementation (--set implementation=huggingface).",
)


_SYMBOL = re.compile(r"(?<![\w.])[A-Za-z]+(?:_[A-Za-z]+)?")  # not the e of 5e8
_MOST_ROUNDING = Fraction(11, 10)  # shards of odd sizes are padded, by little
_POWERS = {"²": 2, "³": 3}


def symbol_values(result: Result) -> dict[str, int]:
    """Return the value of each symbol of the ledger's formulas."""
    from memcalc.layout.symbols import symbol_values as model_values

    parallelism = result.spec.parallelism
    generation = {}
    if result.spec.inference is not None:
        from memcalc.generation.kv_cache_size import symbols_of

        generation = symbols_of(result.spec)
    return model_values(result.spec, result.gpu) | {
        "N": parallelism.data_parallel,
        "p": parallelism.pipeline_parallel,
        "c": parallelism.context_parallel,
        "e": parallelism.expert_parallel,
        **generation,
    }


def with_numbers(formula: str, values: dict[str, int], expected: int) -> str | None:
    """Return the formula with numbers and result; None if a symbol is unknown or the result differs.

    A formula that leaves out a detail is better shown in symbols alone than with a wrong equation.
    """
    symbols = _SYMBOL.findall(formula)
    if not symbols or any(symbol not in values for symbol in symbols):
        return None
    numbers = _SYMBOL.sub(lambda match: str(values[match[0]]), formula)
    value = _evaluate(numbers)
    if value == expected:
        return f"{_spaced(numbers)} = {expected:,}"
    if value is not None and "/" in formula and value < expected <= value * _MOST_ROUNDING + 1:
        return f"{_spaced(numbers)} = {float(value):,.1f}, rounded up to {expected:,}"
    return None


def _spaced(text: str) -> str:
    return re.sub(r"\s*([·+/-])\s*", r" \1 ", text)


def _evaluate(text: str) -> Fraction | None:
    """Return the value of sums, products and quotients of whole numbers; None for anything else."""
    plain = text.replace("·", "*")
    for sign, power in _POWERS.items():
        plain = plain.replace(sign, f"**{power}")
    try:
        return _value(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number) | float(number)):
            return Fraction(number)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left) / _value(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))) if power in _POWERS.values():
            return _value(left) ** power
        case _:
            raise ValueError(ast.dump(node))
