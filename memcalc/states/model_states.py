"""Model states on one rank: weights, master weights, gradients and optimizer states, with sizes and phases.

The recipe's copies are in `recipe_copies`, the optimizer's states and temporaries in `optimizers`; `sharding` gives
the size of a rank's shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameters, stage_parameters
from memcalc.layout.spec_cache import cached_by_spec
from memcalc.layout.stages import Stage, is_steady
from memcalc.layout.teacher import TEACHER, teacher_run, teacher_stage
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Rows
from memcalc.ledger.row import Row
from memcalc.ledger.row_drafts import RowDraft, from_phase, mask_of, phases_of, run_phases
from memcalc.ledger.row_writer import write_rows
from memcalc.spec.spec import Spec
from memcalc.states.flat_states import flat_states
from memcalc.states.optimizer_step import optimizer_step_rows, sub_group_of
from memcalc.states.optimizers.optimizer_states import optimizer_states
from memcalc.states.parameter_copies import UNSHARDED, Role, copy_row
from memcalc.states.recipe_copies import PASSES, is_on_host, kept_copies
from memcalc.states.state_options import StateOptions, groups, state_options
from memcalc.states.state_remainders import state_remainders

STEP = mask_of("optimizer_step_1", "optimizer_step_2")


def state_rows(spec: Spec, stage: Stage, *, tails: bool = True) -> Rows:
    """Return the rows of all model states, parameter by parameter; `tails`: with unsplit remainders of blocks."""
    return _state_rows(_models(spec, stage), run_phases(spec), tails=tails)


def state_sums(spec: Spec, stage: Stage, *, tails: bool = True) -> Mapping[tuple[str, Component], int]:
    """Return the bytes of model states by phase and component, without their rows."""
    return _state_sums(_models(spec, stage), run_phases(spec), tails=tails)


def state_totals(spec: Spec, stage: Stage, *, tails: bool = True) -> Mapping[str, int]:
    """Return the bytes of model states by phase; a phase without any is omitted."""
    return _state_totals(_models(spec, stage), run_phases(spec), tails=tails)


def earlier_gradients(spec: Spec, chunk: Stage) -> tuple[RowDraft, ...]:
    """Return the gradients of a chunk in the phases in which they exist only because of earlier micro-batches."""
    return _earlier_gradients(stage_parameters(spec, chunk), _choice(spec))


@lru_cache(maxsize=1024)
def _earlier_gradients(parameters: LocalParameters, options: StateOptions) -> tuple[RowDraft, ...]:
    without, _ = _state_items((_Model(parameters, options.without_accumulation()),))
    counted, _ = _state_items((_Model(parameters, options),))
    elsewhere: dict[RowDraft, int] = {}
    for item in without:
        alike = item._replace(mask=0)
        elsewhere[alike] = elsewhere.get(alike, 0) | item.mask
    items = (item._replace(mask=item.mask & ~elsewhere.get(item._replace(mask=0), 0)) for item in counted)
    return tuple(item for item in items if item.mask and item.component is Component.GRADIENTS)


def reduced_gradients(spec: Spec, chunk: Stage) -> tuple[RowDraft, ...]:
    """Return the sharded gradients of a chunk, in the passes of later micro-batches."""
    items, _ = _state_items((_Model(stage_parameters(spec, chunk), _choice(spec).without_accumulation()),))
    updated = mask_of("optimizer_step_1")
    gradients = (item for item in items if item.component is Component.GRADIENTS and item.mask & updated)
    return tuple(item._replace(mask=PASSES) for item in gradients)


def state_peak(spec: Spec, stage: Stage) -> int:
    """Return the bytes of model states in the phase that has most; 0 if all of them are in host memory."""
    return max(state_totals(spec, stage, tails=False).values(), default=0)


@cached_by_spec
def _choice(spec: Spec) -> StateOptions:
    """Return the options of a run; without sharding the number of ranks is set to 1."""
    options = state_options(spec)
    return options if options.zero_stage else options._replace(data_parallel=1, expert_shards=1)


def counted_options(spec: Spec, stage: Stage) -> StateOptions:
    """Return the options of a stage's states, which count gradients of earlier micro-batches in a steady step alone."""
    options = _choice(spec)
    return options if is_steady(spec, stage) else options.without_accumulation()


class _Model(NamedTuple):
    """A model on a rank."""

    parameters: LocalParameters  # its parameters on the rank
    options: StateOptions  # the options that its states depend on
    name: str = ""  # before the names of its modules in rows; "": the model that trains. Others are frozen.


def _models(spec: Spec, stage: Stage) -> tuple[_Model, ...]:
    """Return the model that trains, and a teacher."""
    own = _Model(stage_parameters(spec, stage), counted_options(spec, stage))
    if spec.training.teacher is None:
        return (own,)
    run = teacher_run(spec)
    return own, _Model(stage_parameters(run, teacher_stage(spec)), _choice(run), TEACHER)


@lru_cache(maxsize=1024)
def _state_rows(models: tuple[_Model, ...], phases: tuple[str, ...], *, tails: bool) -> Rows:
    def write() -> list[Row]:
        items, remainders = _state_items(models)
        return write_rows(items, "model states", remainders if tails else {}, phases)

    return Rows(write, _state_totals(models, phases, tails=tails))


@lru_cache(maxsize=1024)
def _state_sums(
    models: tuple[_Model, ...], phases: tuple[str, ...], *, tails: bool
) -> Mapping[tuple[str, Component], int]:
    items, remainders = _state_items(models)
    alike = {(Component.BLOCK_ROUNDING, mask): amount for mask, amount in remainders.items() if tails}
    for item in items:
        exact = item.count * item.each
        key, rounding = (item.component, item.mask), (Component.BLOCK_ROUNDING, item.mask)
        alike[key] = alike.get(key, 0) + exact
        alike[rounding] = alike.get(rounding, 0) + item.count * item.block - exact
    sums: dict[tuple[str, Component], int] = {}
    for (component, mask), amount in alike.items():
        for phase in phases_of(mask, phases) if amount else ():
            sums[phase, component] = sums.get((phase, component), 0) + amount
    return MappingProxyType(sums)


@lru_cache(maxsize=1024)
def _state_totals(models: tuple[_Model, ...], phases: tuple[str, ...], *, tails: bool) -> Mapping[str, int]:
    totals: dict[str, int] = {}
    for (phase, _), amount in _state_sums(models, phases, tails=tails).items():
        totals[phase] = totals.get(phase, 0) + amount
    return MappingProxyType(totals)


@lru_cache(maxsize=1024)
def _state_items(models: tuple[_Model, ...]) -> tuple[tuple[RowDraft, ...], Mapping[int, int]]:
    """Return the items of model states, and unsplit remainders by phase mask."""
    items: list[RowDraft] = []
    tails: dict[int, int] = {}
    for model in models:
        found, remainders = _items_of(model)
        items += found
        for mask, amount in remainders.items():
            tails[mask] = tails.get(mask, 0) + amount
    return tuple(items), MappingProxyType(tails)


def _items_of(model: _Model) -> tuple[list[RowDraft], Mapping[int, int]]:
    """Return the items of one model, and unsplit remainders by phase mask; a frozen one has weights alone."""
    items: list[RowDraft] = []
    tails: dict[int, int] = {}
    for group, own, could_train in groups(model.parameters, model.options):
        trains = could_train and not model.name
        copies = [copy for copy in kept_copies(own, trains=trains) if not is_on_host(copy, own)]
        stored, updated, theirs = flat_states(group, own)
        part = sub_group_of(stored, own)
        at_once = [copy for copy in copies if part is not None and copy.mask == STEP]
        copies = [copy for copy in copies if copy not in at_once]
        items += [copy_row(copy, part, UNSHARDED) for copy in at_once if part is not None]
        for copy in copies:
            spread = own.spread(copy.sharded_from_stage)
            late = copy._replace(mask=copy.mask & ~PASSES) if copy.role is Role.GRADIENTS else copy
            # The reduction makes gradients of parameters that no forward reads.
            found = [copy_row(late if held.unused else copy, held, spread) for held in stored]
            items += [item for item in found if item.mask or not copy.mask]
        stays = trains and not own.host.offloads
        states = []
        if stays:
            states = [state for state in optimizer_states(updated, theirs.update, theirs.spread(1)) if not state.paged]
            if own.updates_when_made:
                early = from_phase("optimizer")
                states = [state._replace(item=state.item._replace(mask=early)) for state in states]
            items += optimizer_step_rows(updated, theirs, states)
        remainders = [state_remainders(stored, own, copies, states if updated is stored else ())]
        if updated is not stored:
            remainders.append(state_remainders(updated, theirs, (), states))
        for mask, amount in chain.from_iterable(each.items() for each in remainders):
            tails[mask] = tails.get(mask, 0) + amount
    if model.name:
        items = [item._replace(module=f"{model.name}.{item.module}") for item in items]
    return items, tails
