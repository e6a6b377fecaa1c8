"""Requests of the optimizer step: gradient norms for clipping, the updates, casts for the weight average (EMA)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod

from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.ledger.component import Component
from memcalc.sharding.engine import Engine, OptimizerGroups
from memcalc.simulation.optimizer_update import OptimizerUpdate, update_in_loop
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.states.optimizers.for_loop_step import in_loop_order
from memcalc.states.optimizers.optimizer_states import is_hidden_matrix
from memcalc.states.optimizers.parameter_order import in_order
from memcalc.states.optimizers.step_temporaries import StepOptions, clipping_items
from memcalc.states.optimizers.update_rule import UpdateRule
from memcalc.states.state_options import StateOptions
from memcalc.stream.requests import Requests

SEPARATE = ("momentum", "adafactor")  # foreach steps that create states, or allocate, one dtype at a time


class OptimizerStep:
    """The optimizer steps of a run.

    Args:
        requests: where they are recorded.
        groups: parameters of one dtype, in registration order, and the state options with that dtype.
        prefixes: of each layer's modules, where layers differ; else empty.
        engine: the sharding engine, which allocates buffers before and after each group's update.
        ordered: all parameters of the stage, in registration order.
    """

    def __init__(
        self,
        requests: Requests,
        groups: OptimizerGroups,
        prefixes: Sequence[str],
        engine: Engine,
        ordered: Sequence[LocalParameter],
    ) -> None:
        self.requests = requests
        self.engine = engine
        self.groups = groups
        self.prefixes = prefixes
        self.joint = self._joint(ordered)
        self.updates = [[*self._updates(parameters, choice)] for parameters, choice in groups if not self.joint]
        self.has_states = False  # whether the engine's own update has created the states

    def build(self) -> None:
        """Allocate the states that the constructors of optimizer and engine create."""
        for update, held in self.joint:
            if not update.lazy:
                update.make_states([held])
        for each in chain.from_iterable(self.updates):
            each.build()
        zeros = self.engine.zero_gradients()
        if zeros:
            for each in chain.from_iterable(self.updates):
                each.run(first=True)
            self.requests.drop(zeros)
            self.has_states = True

    def run(self, *, first: bool) -> None:
        """Record one step."""
        first = first and not self.has_states
        for parameters, choice in reversed(self.groups) if self.joint else self.groups:  # as in `_run_joint`
            self._clip(parameters, choice)
        if self.joint:
            self._run_joint(first=first)
        for number, updates in enumerate(self.updates):
            self.engine.before_update(number)
            for each in updates:
                each.run(first=first)
            self.engine.after_update(number)
        for parameters, choice in self.groups:
            self._average(parameters, choice)

    def _joint(self, ordered: Sequence[LocalParameter]) -> list[tuple[OptimizerUpdate, LocalParameter]]:
        """Return the parameters of several dtypes that one optimizer of PyTorch updates, in order, with their updates.

        Megatron-Core has groups of parameters by dtype, DeepSpeed updates one parameter group after another, and Muon
        is two optimizers. Two foreach steps treat each dtype by itself from the start.
        """
        options = {held: each for parameters, each in self.groups for held in parameters}
        trained = [held for held in ordered if held in options]
        if len(self.groups) < 2 or len(set(trained)) < len(options):  # sharded, in flat tensors
            return []
        rules: dict[UpdateRule, list[LocalParameter]] = {}
        for held in dict.fromkeys(trained):
            rules.setdefault(options[held].update, []).append(held)
        rule, choice = next(iter(rules)), options[trained[0]]
        if choice.engine in ("megatron", "deepspeed") or rule.optimizer == "muon":
            return []
        if rule.implementation == "foreach" and rule.optimizer in SEPARATE:
            return []
        spread = choice.spread(1)
        updates = {
            rule: OptimizerUpdate(self.requests, LocalParameters(held), rule, choice.card, self.prefixes, spread)
            for rule, held in rules.items()
        }
        return [(updates[options[held].update], held) for held in in_loop_order(trained, rule)]

    def _run_joint(self, *, first: bool) -> None:
        """Record the step of one optimizer for several dtypes.

        It creates all states, then updates one parameter at a time, or those of one dtype, the last dtype first.
        Source: torch 2.13 torch/optim/adam.py, _init_group; ATen native/ForeachUtils.h,
        _group_tensors_by_first_tensors_device_and_dtype, which fills a std::unordered_map.
        """
        updates = [*dict.fromkeys(update for update, _ in self.joint)]
        loops = updates[0].loops
        for update, held in self.joint if first else ():
            if update.lazy and not (loops and update.on_the_way):
                update.make_states([held])
        if loops:
            update_in_loop(self.requests, self.joint, makes=first)
        elif updates[0].update.implementation == "foreach":
            bound: dict[str, list[int]] = {}
            for update in reversed(updates):
                update.update_lists(bound)
            self.requests.drop(chain.from_iterable(bound.values()))

    def _clip(self, parameters: LocalParameters, options: StateOptions) -> None:
        if not options.step.clips:
            return
        step = StepOptions(clips=True, averages_with_casts=False, spread=options.spread(1), card=options.card)
        items = clipping_items(parameters, options.update, step)
        take = self.requests.take
        self.requests.drop([take(item.each, 0, item.component) for item in items for _ in range(item.count)])

    def _average(self, parameters: LocalParameters, options: StateOptions) -> None:
        """Record the weight average (memcalc/step/ema.py): parameters that are not fp32 are cast one at a time."""
        if options.step.ema != "fp32" or options.update.dtype == "fp32":
            return
        for held in in_order(parameters, options.update.family, self.prefixes):
            size = DTYPE_BYTES["fp32"] * prod(options.spread(1).shape(held))
            self.requests.drop([self.requests.take(size, 0, Component.TEMPORARIES)])

    def _updates(self, parameters: LocalParameters, options: StateOptions) -> Iterator[OptimizerUpdate]:
        """Yield one update for all parameters. Muon updates hidden weight matrices one at a time; AdamW the others."""
        requests, update, card, spread = self.requests, options.update, options.card, options.spread(1)
        if update.optimizer != "muon":
            yield OptimizerUpdate(requests, parameters, update, card, self.prefixes, spread)
            return
        hidden = [held for held in parameters if is_hidden_matrix(held)]
        others = [held for held in parameters if not is_hidden_matrix(held)]
        matrices = update._replace(implementation="for-loop")
        yield OptimizerUpdate(requests, LocalParameters(hidden), matrices, card, self.prefixes, spread)
        rest = update._replace(optimizer="adamw")
        yield OptimizerUpdate(requests, LocalParameters(others), rest, card, self.prefixes, spread)
