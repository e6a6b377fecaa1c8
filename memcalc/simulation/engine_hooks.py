"""The hooks that a sharding engine has on gradients and modules, as calls between the events of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter
from memcalc.programs.program import Activity
from memcalc.sharding.engine import ROOT, Engine, Gradient, KernelPass
from memcalc.simulation.block_steps import BlockStep, BlockSteps

Calls = Mapping[int, Callable[[], None]]  # after each number of a block's events
NO_CALLS: Calls = {}


class BlockFrame(NamedTuple):
    """A block after its forward.

    Args:
        number: number of the block.
        held: live storages, by number in the block's program.
        unit: the layer, or the root.
        rounds: the number of loop rounds that the block stands for.
    """

    number: int
    held: dict[int, int]
    unit: int = ROOT
    rounds: int = 1


class EngineHooks:
    """Where an engine's hooks run in the blocks of a stage.

    Args:
        engine: the engine.
        steps: steps of the blocks.
        parameters: parameters of each unit, by the names of their gradients.
    """

    def __init__(
        self, engine: Engine, steps: BlockSteps, parameters: Mapping[int, Mapping[str, LocalParameter]]
    ) -> None:
        self.engine = engine
        self.steps = steps
        self.parameters = parameters
        # By block, direction and whether it is recomputed: see `_module_changes`.
        self._modules: dict[tuple[int, bool, bool], list[tuple[int, str, bool]]] = {}
        self._first_runs: dict[tuple[int, bool], list[tuple[int, Callable[[], None]]]] = {}

    def calls(
        self, frame: BlockFrame, others: Calls = NO_CALLS, *, backward: bool = False, again: bool = False
    ) -> Calls:
        """Return the calls after each number of a block's events: others first, then gradients, then modules.

        Args:
            frame: the block.
            others: further calls.
            backward: whether the block runs backward.
            again: whether the block is recomputed.
        """
        found: dict[int, list[Callable[[], None]]] = {}
        if backward and self.engine.hooks_gradients:
            for position, storages in self.steps.ready_gradients(frame.number).items():
                found.setdefault(position, []).append(partial(self._hand_over, frame, storages))
        if self.engine.hooks_modules:
            for position, change in self._changes(frame, backward=backward, again=again).items():
                found.setdefault(position, []).append(change)
        if self.engine.hooks_first_runs:
            for position, run in self._runs(frame.number, backward=backward):
                found.setdefault(position, []).append(run)
        if not found:
            return others
        for position, other in others.items():
            found.setdefault(position, []).insert(0, other)
        return {position: partial(_all_of, calls) for position, calls in found.items()}

    def gradients(self, frame: BlockFrame, storages: Sequence[int], *units: int) -> list[Gradient]:
        """Return produced gradients with their parameters of these units, and remove them from the block's frame.

        Args:
            frame: the block.
            storages: numbers in its program; storages that are no longer live are ignored.
            units: the units that own their parameters.
        """
        known = {name: held for unit in units for name, held in self.parameters[unit].items()}
        named = self.steps.parts.blocks[frame.number].program.storages
        return [Gradient(frame.held.pop(at), known.get(named[at].parameter)) for at in storages if at in frame.held]

    def _hand_over(self, frame: BlockFrame, storages: Sequence[int]) -> None:
        for gradient in self.gradients(frame, storages, frame.unit):
            self.engine.gradient_ready(gradient)

    def _changes(self, frame: BlockFrame, *, backward: bool, again: bool) -> dict[int, Callable[[], None]]:
        """Return the event counts at which another module begins or ends: at the first event of its operator."""
        key = (frame.number, backward, again)
        if key not in self._modules:
            steps = self.steps.of(frame.number, "backward" if backward else "forward")
            self._modules[key] = [*self._module_changes(frame.unit, steps)]
        return {
            position: partial(self._change_module, frame, module, again=again or recomputed, backward=backward)
            for position, module, recomputed in self._modules[key]
        }

    def _module_changes(self, unit: int, steps: Sequence[BlockStep]) -> Iterator[tuple[int, str, bool]]:
        """Yield event counts, the module that begins ("": none), and whether it is a recomputation.

        A module runs from the first event of its first operator to the last event of its last one.
        """
        modules = {name.rpartition(".")[0] for name in self.parameters[unit]}
        names = {name: self.engine.module_of(unit, name) for name in modules}
        at_work = [
            (position, module, event.operator.when is Activity.AGAIN)
            for position, (event, *_) in enumerate(steps)
            if (module := names.get(event.operator.module))
        ]
        end = 0
        for (module, again), events in groupby(at_work, key=lambda each: each[1:]):
            positions = [position for position, *_ in events]
            if 0 < end < positions[0]:
                yield end, "", False
            yield positions[0], module, again
            end = positions[-1] + 1
        if end:
            yield end, "", False

    def _runs(self, number: int, *, backward: bool) -> list[tuple[int, Callable[[], None]]]:
        """Return the event counts at which an operator needs a buffer or has called a compiled kernel, with the hooks.

        A kernel is called once its results exist: in forward all of them, in backward the first.
        """
        if (number, backward) not in self._first_runs:
            found = self._first_runs[number, backward] = []
            block, begin = self.steps.parts.blocks[number], 0
            for operator, events in groupby(
                (step.event for step in self.steps.of(number, "backward" if backward else "forward")),
                key=lambda event: event.operator,
            ):
                signs = [event.sign for event in events]
                if operator.buffer and not (backward and operator.when is Activity.RUN):
                    found.append((begin, partial(self.engine.first_buffer, operator.buffer)))
                if operator.kernel and 1 in signs:
                    again = operator.when is Activity.AGAIN
                    is_backward = backward and not again
                    made = signs.index(1) if is_backward else len(signs) - 1 - signs[::-1].index(1)
                    passing: KernelPass = (
                        "backward" if is_backward else "forward" if again or not block.again else "forward alone"
                    )
                    run = partial(
                        self.engine.first_kernel, operator.kernel, passing, block.sized.exact[operator.output]
                    )
                    found.append((begin + made + 1, run))
                begin += len(signs)
        return self._first_runs[number, backward]

    def _change_module(self, frame: BlockFrame, module: str, *, again: bool, backward: bool) -> None:
        if backward and self.engine.reduces_modules:
            self.engine.module_gradients(self.gradients(frame, self._produced_by_modules(frame), frame.unit))
        self.engine.after_module()
        if module:
            self.engine.before_module(frame.unit, module, again=again)

    def _produced_by_modules(self, frame: BlockFrame) -> list[int]:
        """Return the live gradients of a block's hooked modules."""
        storages = self.steps.parts.blocks[frame.number].program.storages
        names = ((at, storages[at].parameter.rpartition(".")[0]) for at in frame.held)
        return [at for at, name in names if name and self.engine.module_of(frame.unit, name)]


def _all_of(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
