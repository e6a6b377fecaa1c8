"""What happens to tensors on a small tape, told so that it can be followed by hand.

A story is the list of a stream's events: "+x" where x is allocated, "-x" where it is freed. Gradients are called as
the tensors they belong to: "gradient of x".
"""

from __future__ import annotations

from collections.abc import Iterable

from memcalc.operators import Operators
from memcalc.operators.base import Dtypes
from memcalc.programs.program import Program, StorageEvent
from memcalc.programs.tape import Tape, Tensor
from memcalc.programs.tape_compiler import compiled

AXES = ("n", "k")


def block(*, compute: str = "bf16", parameters: str = "bf16", autocast: bool = False) -> tuple[Operators, Tensor]:
    """An empty tape with its input."""
    tape = Tape()
    x = tape.input("x", AXES, parameters, "")
    return Operators(tape, Dtypes(compute, parameters, autocast)), x


def compile_(ops: Operators, output: Tensor | None, *, kept: bool = True, main: str | None = None) -> Program:
    return compiled(ops.tape, output, keeps_gradients=kept, main_gradient_dtype=main)


def story(done: Program, events: Iterable[StorageEvent]) -> list[str]:
    return [f"{'+' if event.sign > 0 else '-'}{done.storages[event.storage].name}" for event in events]


def names(done: Program, storages: Iterable[int]) -> list[str]:
    return [done.storages[index].name for index in storages]
