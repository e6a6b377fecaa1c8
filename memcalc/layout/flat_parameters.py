"""FSDP1's flat parameters: all parameters of a unit in one tensor, of which each rank has an equal chunk.

Units are the layers and the root, which has all other parameters. With PEFT's policy each module that trains is a unit,
too, and the layers and the root have the frozen parameters. Sources: torch 2.13 distributed/fsdp/_flat_param.py,
FlatParamHandle; peft 0.21 utils/other.py, fsdp_auto_wrap_policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter

ALIGNMENT = 16  # bytes; _get_aligned_numel: each parameter begins at a multiple of it, with use_orig_params=True
ROOT_MODULE, FLAT = "root", "flat parameter"


class FlatUnit(NamedTuple):
    """The flat parameter of one unit.

    Args:
        ranges: the elements of each parameter in it.
        elements: its elements, with the padding between parameters.
        shard: elements of a rank's chunk, padded on the last ranks.
        padding: elements of each padding between parameters and after the last one.
    """

    ranges: tuple[range, ...]
    elements: int
    shard: int
    padding: tuple[int, ...] = ()

    def pieces(self, rank: int) -> Iterator[int]:
        """Yield the elements of each parameter in a rank's chunk; 0 if it has none."""
        begin, end = rank * self.shard, (rank + 1) * self.shard
        for own in self.ranges:
            yield max(min(own.stop, end) - max(own.start, begin), 0)


def flat_unit(parameters: Sequence[LocalParameter], ranks: int, element_bytes: int, *, aligned: bool) -> FlatUnit:
    """Return the flat parameter of a unit (_init_flat_param_and_metadata).

    Args:
        parameters: the parameters of the unit, in registration order.
        ranks: ranks that it is sharded across.
        element_bytes: bytes of an element in the dtype in which modules compute.
        aligned: whether parameters are aligned, and the total is a multiple of the ranks: with use_orig_params=True.
    """
    step, at = (ALIGNMENT // element_bytes if aligned else 1), 0
    ranges: list[range] = []
    padding: list[int] = []
    for parameter in parameters:
        padding.append(-at % step)
        at += padding[-1]
        ranges.append(range(at, at + parameter.elements))
        at += parameter.elements
    if aligned:
        padding.append(-at % ranks)
        at += padding[-1]
    return FlatUnit(tuple(ranges), at, -(-at // ranks), tuple(filter(None, padding)))


def units_of(
    before: Sequence[LocalParameter],
    inside: Sequence[LocalParameter],
    after: Sequence[LocalParameter],
    *,
    trained_apart: bool,
    joined_layers: int,
    least_apart: int,
) -> Iterator[tuple[str, tuple[LocalParameter, ...]]]:
    """Yield the name and the parameters of each distinct unit.

    Args:
        before: the parameters before the layers.
        inside: those of one layer of each type.
        after: those after the layers.
        trained_apart: whether each module that trains is a unit.
        joined_layers: number of layers with parameters in the root's unit; 0: they are units.
        least_apart: if so, parameters from which on a module outside of layers is a unit; 0: none is.
    """
    units: dict[str, list[LocalParameter]] = {}
    if joined_layers:
        for parameter in in_every_layer((*before, *inside, *after), joined_layers):
            name = parameter.module if is_apart(parameter, least_apart) else ROOT_MODULE
            units.setdefault(name, []).append(parameter)
        yield from ((name, tuple(members)) for name, members in units.items())
        return
    for parameter in (*inside, *before, *after):
        name = f"{parameter.module.partition('*')[0]}*" if parameter.where == "layer" else ROOT_MODULE
        units.setdefault(parameter.module if trained_apart and parameter.trains else name, []).append(parameter)
    for name, members in units.items():
        yield name, tuple(members)


def in_every_layer(parameters: Iterable[LocalParameter], layers: int) -> list[LocalParameter]:
    """Return a model's parameters, those of each layer one after the other, from those of one layer."""
    found: list[LocalParameter] = []
    for is_inside, members in groupby(parameters, key=lambda each: each.where == "layer"):
        found += [each._replace(count=1) for each in members] * layers if is_inside else members
    return found


def is_apart(parameter: LocalParameter, least: int) -> bool:
    """Return whether a module with one parameter, outside of layers, is a unit because it has at least so many."""
    return parameter.where != "layer" and 0 < least <= parameter.elements


def module_in(parameter: LocalParameter) -> str:
    """Return the name of a parameter's module in its layer, or outside of layers; a trained copy has the original's."""
    return parameter.module.rpartition("*.")[2].removesuffix(".saved")


def flat_row(name: str, parameters: Sequence[LocalParameter], unit: FlatUnit, where: str) -> LocalParameter:
    """Return the flat parameter of a unit as one parameter.

    Args:
        name: name of the unit.
        parameters: its parameters.
        unit: its flat parameter.
        where: the part of the model: embedding, layer or head.
    """
    symbol = "P_root" if name == ROOT_MODULE else "P_layer" if name.endswith("*") else "P_module"
    first = parameters[0]
    count = 1 if name == ROOT_MODULE else first.count
    axes = ((symbol, unit.elements),)
    return LocalParameter(name, FLAT, axes, count, where, first.dtype, any(each.trains for each in parameters))


def piece(parameter: LocalParameter, elements: int) -> LocalParameter:
    """Return a rank's part of a parameter: a view of its chunk of the flat parameter."""
    return parameter._replace(axes=(("n", elements),), gradient=())
