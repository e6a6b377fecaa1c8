"""The units of FSDP1 in a model: its layers, the root and, with PEFT's policy, each module that trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from memcalc.layout.flat_parameters import in_every_layer, module_in
from memcalc.layout.local_parameters import LocalParameter
from memcalc.sharding.engine import ROOT
from memcalc.states.flat_states import has_own_unit, is_joined
from memcalc.states.state_options import StateOptions


class UnitKey(NamedTuple):
    """A unit.

    Args:
        place: the layer, or the root.
        module: the module in it that is the unit; "": the unit has all parameters there that are in no module's unit.
    """

    place: int
    module: str = ""


THE_ROOT = UnitKey(ROOT)


def unit_of_parameter(place: int, parameter: LocalParameter, options: StateOptions) -> UnitKey:
    """Return the unit of a parameter of a layer or of the root."""
    if is_joined(parameter, options.fsdp):
        return THE_ROOT
    return UnitKey(place, module_in(parameter) if has_own_unit(parameter, options.fsdp) else "")


def units_in_order(
    units: Mapping[int, Sequence[LocalParameter]], options: StateOptions
) -> dict[UnitKey, tuple[LocalParameter, ...]]:
    """Return the parameters of each unit, in the order in which forward begins the units: the root, then the layers.

    Modules that are units follow their layer; those of the root are before the layers if they embed tokens. Recordings
    of a step have fewer layers than the model, of which the root has the joined parts of all.
    """
    joined = dict.fromkeys(each for members in units.values() for each in members if is_joined(each, options.fsdp))
    if joined:
        units = {place: [each for each in members if each not in joined] for place, members in units.items()}
        units[ROOT] = [*units[ROOT], *in_every_layer(joined, options.fsdp.layers)]
    found: dict[UnitKey, list[LocalParameter]] = {}
    at_end: dict[UnitKey, list[LocalParameter]] = {}
    for place in (ROOT, *sorted(place for place in units if place != ROOT)):
        own = [(unit_of_parameter(place, each, options), each) for each in units.get(place, ()) if not each.beside]
        for unit, parameter in sorted(own, key=lambda each: bool(each[0].module)):  # stable
            late = place == ROOT and unit.module and parameter.where == "head"
            (at_end if late else found).setdefault(unit, []).append(parameter)
    return {unit: tuple(members) for unit, members in (found | at_end).items()}


def in_order_of_end(began: Sequence[UnitKey]) -> list[UnitKey]:
    """Return units in the order in which forward ends them: modules before their layer, and the root last."""
    together = (sorted(units, key=lambda unit: not unit.module) for _, units in groupby(began, key=attrgetter("place")))
    return [*(unit for units in together for unit in units if unit != THE_ROOT), THE_ROOT]
