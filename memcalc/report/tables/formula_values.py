"""Formulas with numbers filled in: "2·b·s·d" as "2 · 1 · 2048 · 12288"."""

from __future__ import annotations

import ast
import re
from fractions import Fraction

from memcalc.ledger.result import Result

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
