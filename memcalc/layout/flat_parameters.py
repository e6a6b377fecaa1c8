"""FSDP1's flat parameters: all parameters of a unit in one tensor, of which each rank has an equal chunk.

Units are the layers and the root, which has all other parameters. With PEFT's policy each module that trains is a unit,
too, and the layers and the root have the frozen parameters. Sources: torch 2.13 distributed/fsdp/_flat_param.py,
FlatParamHandle; peft 0.21 utils/other.py, fsdp_auto_wrap_policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter

ALIGNMENT = 16  # bytes; _get_aligned_numel: each parameter begins at a multiple of it, with use_orig_params=True
ROOT_MODULE, FLAT = "root", "flat parameter"


class FlatUnit(NamedTuple):
    """The flat parameter of one unit."""

    ranges: tuple[range, ...]  # the elements of each parameter in it
    elements: int  # its elements, with the padding between parameters
    shard: int  # elements of a rank's chunk, padded on the last ranks
    padding: tuple[int, ...] = ()  # elements of each padding between parameters and after the last one

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
    name_of: Callable[[LocalParameter], str],
    layers: int,
) -> Iterator[tuple[str, tuple[LocalParameter, ...]]]:
    """Yield the name and the parameters of each distinct unit.

    Args:
        before: the parameters before the layers.
        inside: those of one layer of each type.
        after: those after the layers.
        name_of: the name of a parameter's unit: the root, a layer of its type, or a module.
        layers: the number of layers.
    """
    joined = [parameter for parameter in inside if name_of(parameter) == ROOT_MODULE]
    units: dict[str, list[LocalParameter]] = {}
    for parameter in (*inside, *before, *in_every_layer(joined, layers), *after):
        if parameter not in joined:
            units.setdefault(name_of(parameter), []).append(parameter)
    for name, members in units.items():
        yield name, tuple(members)


def in_every_layer(parameters: Iterable[LocalParameter], layers: int) -> list[LocalParameter]:
    """Return the parameters of each layer, one after the other, from those of one layer; they count as no layer's."""
    return [parameter._replace(count=1, where="head") for parameter in parameters] * layers


def is_apart(parameter: LocalParameter, least: int) -> bool:
    """Return whether a module with one parameter, outside of layers, is a unit because it has at least so many."""
    return parameter.where != "layer" and 0 < least <= parameter.elements


def part_of(parameter: LocalParameter) -> str:
    """Return the part of a layer that has a parameter: attention, mlp, or a norm."""
    return module_in(parameter).partition(".")[0]


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
