"""Layers of a stage as loops: equal rounds of a pattern of layers are recorded once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.layout.parameters import layer_prefixes
from memcalc.layout.stages import LayerModules, Stage, modules_by_layer
from memcalc.spec.recompute_plan import Segment
from memcalc.spec.spec import Spec

LONGEST_PERIOD = 12  # longest repeating pattern, in layers
FEWEST_ROUNDS = 4  # rounds of a pattern: first, last, and a loop of at least two


class LayerLoop(NamedTuple):
    """Consecutive layers of a stage, as items of the recomputation plan, that represent several equal rounds."""

    items: Segment
    rounds: int = 1


def loops_of(spec: Spec, plan: Segment) -> tuple[LayerLoop, ...]:
    """Return the items of a plan, with equal rounds in the middle of a pattern that repeats as one loop.

    The first and the last round of a pattern are separate, because an engine prefetches for the next round and frees
    tensors of the previous one.
    """
    numbers: dict[Hashable, int] = {}  # of distinct keys: numbers are compared faster
    modules = modules_by_layer(spec)
    keys = [modules(item) if isinstance(item, int) else _key(modules, item) for item in plan]
    return _loops_of(plan, tuple([numbers.setdefault(key, len(numbers)) for key in keys]))


@lru_cache(maxsize=256)
def _loops_of(plan: Segment, keys: tuple[int, ...]) -> tuple[LayerLoop, ...]:
    return tuple(_loops(plan, keys))


def _loops(plan: Segment, keys: Sequence[int]) -> Iterator[LayerLoop]:
    at = 0
    while at < len(plan):
        saved, period, rounds = max(_patterns(keys, at))
        if saved <= 0:
            yield LayerLoop(plan[at : at + 1])
            at += 1
            continue
        yield LayerLoop(plan[at : at + period])
        yield LayerLoop(plan[at + period : at + 2 * period], rounds - 2)
        at += period * (rounds - 1)
        yield LayerLoop(plan[at : at + period])
        at += period


def _patterns(keys: Sequence[int], at: int) -> Iterator[tuple[int, int, int]]:
    """Yield for each period how many items a loop from a position on saves, the period, and its rounds.

    Longer periods that cannot save as much as a shorter one are left out.
    """
    most = 0
    for period in range(1, LONGEST_PERIOD + 1):
        end = at + period
        while end < len(keys) and keys[end] == keys[end - period]:
            end += 1
        rounds = (end - at) // period
        saved = period * (rounds - FEWEST_ROUNDS + 1)
        yield saved, period, rounds
        most = max(most, saved)
        if len(keys) - at - (period + 1) * (FEWEST_ROUNDS - 1) < most:
            return


def _key(modules: Callable[[int], LayerModules], item: int | Segment) -> Hashable:
    """Return a key that items of a plan with the same requests share; `modules`: of each layer."""
    return modules(item) if isinstance(item, int) else tuple(_key(modules, inner) for inner in item)


def of_layers(parameters: LocalParameters, spec: Spec, stage: Stage, layers: Sequence[int]) -> LocalParameters:
    """Return a stage's parameters with only some of its layers."""
    whole, some = (layer_prefixes(spec.model, each) for each in (range(stage.first, stage.stop), layers))
    kept: list[LocalParameter] = []
    for parameter in parameters:
        if parameter.where != "layer":
            kept.append(parameter)
            continue
        prefix = parameter.module.partition("*")[0]
        of = (some.count(prefix), whole.count(prefix)) if whole else (len(layers), stage.stop - stage.first)
        kept.append(parameter._replace(count=parameter.count * of[0] // of[1]))
    return LocalParameters(kept)
