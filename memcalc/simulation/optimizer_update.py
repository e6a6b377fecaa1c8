"""Requests of one optimizer's update: its states, and the temporaries of the step in order.

`memcalc.states.optimizers` computes the peak; this module gives the order of allocations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain

from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.ledger.component import Component
from memcalc.states.optimizers.for_loop_step import (
    NORM,
    OVER_ROWS,
    CreateStates,
    Keep,
    creates_states_in_loop,
    in_loop_order,
    script_of,
)
from memcalc.states.optimizers.foreach_step import DECAYED, DROPPED_BEFORE, LAST_LISTS, foreach_lists
from memcalc.states.optimizers.optimizer_states import first_phase, own_states, shared_states
from memcalc.states.optimizers.parameter_order import in_order
from memcalc.states.optimizers.step_buffers import Buffer, LiveTensor, item_of, kernel_script
from memcalc.states.optimizers.step_temporaries import OWN_ROWS, gradient_reads, has_whole_gradient
from memcalc.states.optimizers.update_rule import UpdateRule
from memcalc.states.parameter_copies import UNSHARDED, ShardCounts
from memcalc.stream.requests import Requests
from memcalc.workspaces.multiprocessors import Multiprocessors


class OptimizerUpdate:
    """All updates by one optimizer; the first one allocates the states.

    Args:
        requests: where they are recorded.
        parameters: parameters of the optimizer, in registration order.
        update: the update rule.
        card: the GPU's multiprocessors, which determine the scratch memory of reductions.
        prefixes: of each layer's modules, where layers differ; else empty.
        spread: the number of ranks that parameters are sharded across.
    """

    def __init__(
        self,
        requests: Requests,
        parameters: LocalParameters,
        update: UpdateRule,
        card: Multiprocessors,
        prefixes: Sequence[str] = (),
        spread: ShardCounts = UNSHARDED,
    ) -> None:
        self.requests = requests
        self.parameters = parameters
        self.in_order = tuple(in_loop_order(in_order(parameters, update.family, prefixes), update))
        self.update = update
        self.card = card
        self.spread = spread
        self.lazy = first_phase(update) != "optimizer"
        self.sizes: dict[LocalParameter, list[int]] = {}  # requests of one parameter's states
        for held in dict.fromkeys(parameters):
            states = own_states(held, update, spread)
            self.sizes[held] = [state.item.each for state in states if not (state.paged or state.replaced)]
        self.replaced: dict[LocalParameter, deque[int]] = {}  # replaced states: one of a layer for each layer
        shared = (state.item for state in shared_states(parameters, update, spread))
        self.shared = [item.each for item in shared for _ in range(item.count)]  # allocated with the first parameter's

    def build(self) -> None:
        """Allocate the states that the optimizer's constructor creates."""
        if not self.lazy:
            self.make_states(self.in_order)

    def run(self, *, first: bool) -> None:
        """Record one step."""
        foreach = self.update.implementation == "foreach"
        decayed_before = foreach and self.update.optimizer == "momentum" and self.update.decays
        bound = {DECAYED: self._list(DECAYED)} if decayed_before else {}
        if first and self.lazy and not self.on_the_way:
            self.make_states(self.in_order)
        if not self.loops:
            self._read_gradients(self.in_order)
        if foreach and self.update.optimizer == "adafactor":
            self._factored()
        elif foreach:
            self.update_lists(bound)
            self.requests.drop(chain.from_iterable(bound.values()))
        elif self.loops:
            update_in_loop(self.requests, ((self, held) for held in self.in_order), makes=first)
        elif first and self.lazy and self.on_the_way:
            self.make_states(self.in_order)

    @property
    def on_the_way(self) -> bool:
        """Whether the first step creates each parameter's states with its update, not all at its start."""
        return creates_states_in_loop(self.update) and self.update.implementation != "foreach"

    @property
    def loops(self) -> bool:
        """Whether parameters are updated one at a time."""
        return self.update.implementation == "for-loop" and not self.update.paged

    def make_states(self, parameters: Iterable[LocalParameter]) -> None:
        """Allocate the states of some parameters."""
        for held in parameters:
            for size in (*self.shared, *self.sizes[held]):
                self.requests.take(size, 0, Component.OPTIMIZER_STATE)
            self.shared = []

    def _read_gradients(self, parameters: Iterable[LocalParameter]) -> None:
        """Copy a rank's rows out of unsharded gradients, once or twice for each operator that reads them."""
        whole = [held for held in parameters if has_whole_gradient(held, self.spread)]
        for copies in gradient_reads(self.update) if whole else ():
            for held in whole:
                self.requests.drop([self._take(held, OWN_ROWS) for _ in range(copies)])

    def _list(self, name: str) -> list[int]:
        sizes: dict[int, int] = {}  # of identical layers, which share the same object
        return [
            self._temporary(sizes.get(id(held)) or sizes.setdefault(id(held), self._size(held, Buffer(name))))
            for held in self.in_order
        ]

    def update_lists(self, bound: dict[str, list[int]]) -> None:
        """Record a foreach update; `bound`: the lists that the step's variables reference until they are rebound."""
        if self.update.decays and self.update.optimizer in DROPPED_BEFORE:
            self.requests.drop(self._list(DECAYED))
        names = foreach_lists(self.update)
        for name in names[1:] if DECAYED in bound else names:
            made = self._list(name)
            self.requests.drop(bound.pop(name, ()))
            bound[name] = made
        if self.update.optimizer == "rprop":  # torch/optim/rprop.py: three masks of each sign, then torch.where
            for held in self.in_order:
                for _ in ("gt", "lt", "eq"):
                    self.requests.drop([self._take(held, Buffer("mask", dtype="bool"))])
            for held in self.in_order:
                condition = self._take(held, Buffer("condition", dtype="bool"))
                self.requests.drop([condition, self._take(held, Buffer("chosen"))])
        last = LAST_LISTS.get(self.update.optimizer)
        if last is not None:
            kept = 1 if self.update.optimizer == "rprop" else 0  # the variable of its loop still references a sign
            for name in names:
                freed = len(bound[name]) - kept
                self.requests.drop(bound[name][:freed])
                bound[name] = bound[name][freed:]
            made = self._list(last)
            self.requests.drop(bound.pop(last, ()))
            bound[last] = made

    def _factored(self) -> None:
        """torch/optim/_adafactor.py, _multi_tensor_adafactor: matrices, then vectors; all updates end together."""
        matrices = [parameter for parameter in self.in_order if len(parameter.axes) > 1]
        vectors = [parameter for parameter in self.in_order if len(parameter.axes) == 1]
        self._norms(matrices)
        self.requests.drop([self._take(held, Buffer("means of the rows", "rows")) for held in matrices])
        means: list[int] = []
        for parameter in matrices:
            means.append(self._take(parameter, Buffer("means of the columns", "columns")))
            if len(parameter.axes) == len(("out", "in")):  # scratch of a sum over each expert's rows is not modelled
                self.requests.drop([self._take(parameter, OVER_ROWS)])
        self.requests.drop(means)
        updates = [self._take(held, Buffer("update")) for held in matrices]
        number = Buffer("mean of the row means")
        self.requests.drop([self._take(parameter._replace(axes=()), number) for parameter in matrices])
        self._norms(matrices)  # of the updates
        self._norms(vectors)
        self.requests.drop([self._take(held, Buffer("square of gradient")) for held in vectors])
        updates += [self._take(held, Buffer("update")) for held in vectors]
        self._norms(vectors)
        self.requests.drop(updates)

    def _norms(self, parameters: Iterable[LocalParameter]) -> None:
        """Record the norm of each of these parameters, or of a tensor of its size."""
        for held in parameters:
            self.requests.drop([self._take(held, NORM)])

    def update_one(self, held: LocalParameter, bound: dict[str, int], *, makes: bool) -> None:
        """Record the update of one parameter; `bound`: the tensors of the loop's variables."""
        makes = makes and self.lazy and self.on_the_way
        for statement in script_of(self.update, held):
            if isinstance(statement, CreateStates):
                if makes:
                    self.make_states([held])
                self._read_gradients([held])
                continue
            if isinstance(statement, Keep):
                self._replace(held, bound.pop(statement.variable), exists=not makes)
                continue
            temporaries = [self._take(held, buffer) for buffer in statement.temporaries]
            made = None if statement.result is None else self._take(held, statement.result)
            self.requests.drop([self._take(held, buffer) for buffer in statement.scratch])
            self.requests.drop(temporaries)
            if statement.target in bound:
                self.requests.drop([bound.pop(statement.target)])
            if made is not None:
                bound[statement.target] = made

    def _replace(self, held: LocalParameter, storage: int, *, exists: bool) -> None:
        """Make a storage a parameter's replaced state, and free the state of the step before, if it exists."""
        states = self.replaced.setdefault(held, deque())
        self.requests.relabel(storage, Component.OPTIMIZER_STATE)
        if exists:
            self.requests.drop([states.popleft()])
        states.append(storage)

    def _take(self, parameter: LocalParameter, buffer: Buffer) -> int:
        script = kernel_script(parameter, buffer, self.spread, self.card)
        if script is not None:
            return self.requests.play(script, Component.TEMPORARIES)
        return self._temporary(self._size(parameter, buffer))

    def _temporary(self, size: int) -> int:
        return self.requests.take(size, 0, Component.TEMPORARIES)

    def _size(self, parameter: LocalParameter, buffer: Buffer) -> int:
        alive = LiveTensor(parameter._replace(count=1), buffer)
        return item_of(alive, self.update, self.spread, self.card, 0, "").each


def update_in_loop(
    requests: Requests, parameters: Iterable[tuple[OptimizerUpdate, LocalParameter]], *, makes: bool
) -> None:
    """Record updates of one parameter at a time; a variable keeps its tensor until it is reassigned.

    Args:
        requests: where they are recorded.
        parameters: each with its update.
        makes: whether the states that an update creates on the way are missing.
    """
    bound: dict[str, int] = {}
    for update, held in parameters:
        update.update_one(held, bound, makes=makes)
    requests.drop(bound.values())
