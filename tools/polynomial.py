"""Sums of products of symbols, so that a block's tensors add up to a formula: 34·b·s·d + 5·b·s²·h."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from fractions import Fraction

from memcalc.layout.symbols import MEANINGS

Monomial = Mapping[str, int]  # symbol -> exponent, never 0

ORDER = {symbol: position for position, symbol in enumerate(MEANINGS)}
POWERS = {1: "", 2: "²", 3: "³"}


class Polynomial:
    """A sum of coefficient × monomial, in the order in which the monomials first appeared."""

    def __init__(self, terms: Iterable[tuple[Monomial, Fraction]] = ()) -> None:
        self.terms: dict[frozenset[tuple[str, int]], Fraction] = {}
        for monomial, coefficient in terms:
            key = frozenset((symbol, exponent) for symbol, exponent in monomial.items() if exponent)
            self.terms[key] = self.terms.get(key, Fraction(0)) + coefficient

    def _pairs(self) -> list[tuple[dict[str, int], Fraction]]:
        return [(dict(key), coefficient) for key, coefficient in self.terms.items()]

    def __add__(self, other: Polynomial) -> Polynomial:
        """The sum."""
        return Polynomial([*self._pairs(), *other._pairs()])

    def __sub__(self, other: Polynomial) -> Polynomial:
        """The difference."""
        return self + number(-1) * other

    def __mul__(self, other: Polynomial) -> Polynomial:
        """The product."""
        return Polynomial(
            ({s: a.get(s, 0) + b.get(s, 0) for s in a.keys() | b.keys()}, m * n)
            for a, m in self._pairs()
            for b, n in other._pairs()
        )

    def __truediv__(self, other: Polynomial) -> Polynomial:
        """The quotient; the divisor has one term."""
        ((divisor, coefficient),) = other._pairs()
        return self * Polynomial([({s: -e for s, e in divisor.items()}, 1 / coefficient)])

    def replaced(self, old: tuple[str, ...], new: tuple[str, ...]) -> Polynomial:
        """The same with the symbols `new` in the place of `old`, wherever all of `old` are factors."""

        def swapped(monomial: dict[str, int]) -> dict[str, int]:
            while all(monomial.get(symbol, 0) > 0 for symbol in old):
                for symbols, step in ((old, -1), (new, 1)):
                    for symbol in symbols:
                        monomial[symbol] = monomial.get(symbol, 0) + step
            return monomial

        return Polynomial((swapped(monomial), coefficient) for monomial, coefficient in self._pairs())

    def __str__(self) -> str:
        """As papers write it, e.g. 34·b·s·d + 16·b·s."""
        # Statistics and biases last, as papers write them; else in the order of the tensors.
        ordered = sorted(self._pairs(), key=lambda pair: -min(sum(pair[0].values()), 3))
        signed = [("-" if c < 0 else "+", _written(m, abs(c))) for m, c in ordered if c]
        return " ".join(word for term in signed for word in term).removeprefix("+ ")


ZERO = Polynomial()


def number(value: int) -> Polynomial:
    """A constant."""
    return Polynomial([({}, Fraction(value))])


def symbol(name: str) -> Polynomial:
    """A symbol by itself."""
    return Polynomial([({name: 1}, Fraction(1))])


def axes_product(axes: Iterable[str], factor: int = 1) -> Polynomial:
    """The product of several axes, each an expression: ("b", "s", "(h+2·h_kv)·d_h")."""
    product = number(factor)
    for axis in axes:
        product = product * _value(ast.parse(axis.replace("·", "*"), mode="eval").body)
    return product


def _value(node: ast.expr) -> Polynomial:
    match node:
        case ast.Constant(value=int(value)):
            return number(value)
        case ast.Name(id=name):
            return symbol(name)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left) / _value(right)
    raise ValueError(ast.unparse(node))


def _written(monomial: dict[str, int], coefficient: Fraction) -> str:
    names = sorted(monomial, key=lambda name: ORDER.get(name, len(ORDER)))
    above = [f"{name}{POWERS[monomial[name]]}" for name in names if monomial[name] > 0]
    below = [f"/{name}{POWERS[-monomial[name]]}" for name in names if monomial[name] < 0]
    leading = [] if coefficient == 1 and above else [str(coefficient)]
    return "·".join([*leading, *above]) + "".join(below)
