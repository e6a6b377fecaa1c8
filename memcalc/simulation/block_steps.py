"""The events of a stage's blocks, prepared once for all identical layers: what each allocates or frees."""

from __future__ import annotations

from itertools import groupby
from typing import Literal, NamedTuple

from memcalc.ledger.component import Component
from memcalc.programs.program import Activity, StorageEvent
from memcalc.simulation.stage_blocks import StageBlocks
from memcalc.stream.requests import TensorLabel

StreamName = Literal["forward", "backward"]


class BlockStep(NamedTuple):
    """One event of a block.

    Args:
        event: the event.
        storage: the number of its storage in the program.
        size: bytes to allocate if the event only allocates; otherwise 0.
        frees: whether the event only frees the storage.
    """

    event: StorageEvent
    storage: int
    size: int
    frees: bool


class BlockSteps:
    """The steps and labels of a stage's blocks, by block number.

    Args:
        parts: the blocks of the stage.
        splits_workspaces: whether each buffer of an operator's workspace is a separate storage, as for an allocator;
            otherwise the workspace is one storage, as large as its buffers at their peak.
        inputs_only: whether backward computes no gradients of parameters.
    """

    def __init__(self, parts: StageBlocks, *, splits_workspaces: bool = True, inputs_only: bool = False) -> None:
        self.parts = parts
        self.inputs_only = inputs_only
        self.splits_workspaces = splits_workspaces
        self._steps: dict[tuple[int, StreamName], list[BlockStep]] = {}
        self._labels: dict[int, list[TensorLabel]] = {}
        self._ready: dict[int, dict[int, list[int]]] = {}

    def of(self, number: int, stream: StreamName) -> list[BlockStep]:
        """Return the steps of a block's forward or backward."""
        if (number, stream) not in self._steps:
            block = self.parts.blocks[number]
            exact, scripts = block.sized.exact, block.sized.scripts if self.splits_workspaces else {}
            transferred = {*(self.parts.masks_until if block.opens else ()), *block.program.handed}
            steps: list[BlockStep] = []
            for event in block.program.stream(stream):
                at, operator = event.storage, event.operator
                if self.inputs_only and block.program.storages[at].component is Component.GRADIENTS:
                    continue
                plain = operator.when not in (Activity.START, Activity.END) and not operator.in_head
                takes = plain and event.sign > 0 and at not in scripts
                frees = plain and event.sign < 0 and at not in transferred and at != block.program.tied_sum
                steps.append(BlockStep(event, at, exact[at] if takes else 0, frees))
            self._steps[number, stream] = steps
        return self._steps[number, stream]

    def labels(self, number: int) -> list[TensorLabel]:
        """Return the label of each storage of a block."""
        if number not in self._labels:
            storages = self.parts.blocks[number].program.storages
            self._labels[number] = [
                TensorLabel(number, at, each.component or Component.TEMPORARIES) for at, each in enumerate(storages)
            ]
        return self._labels[number]

    def output_gradient(self) -> int:
        """Return the number of events of the head's backward until the gradient of the model's output is produced."""
        operators = (event.operator for event in self.parts.blocks[self.parts.head].program.backward)
        of_model = (at for at, each in enumerate(operators) if each.when is not Activity.START and not each.in_loss)
        return next(of_model, 0)

    def ready_gradients(self, number: int) -> dict[int, list[int]]:
        """Return the storages of gradients of a block that are ready after each number of events of its backward.

        Autograd's hooks run when an operator's backward has ended. The gradient of a tied head is ready when the
        embedding's gradient has been added to it. A gradient of several parts is ready with its last part. A fused loss
        has made a gradient in forward, which its backward, the first of all, returns.
        """
        if number in self._ready:
            return self._ready[number]
        program, events = self.parts.blocks[number].program, [step.event for step in self.of(number, "backward")]
        gradients = {at for at, each in enumerate(program.storages) if each.component is Component.GRADIENTS}
        gradients.discard(program.tied_gradient)
        found = self._ready[number] = {}
        for event in program.loss:
            if event.sign > 0 and event.storage in gradients:
                found.setdefault(1, []).append(event.storage)
        end, ends = 0, dict[str, int]()  # of the operators that make parts of each parameter's gradient
        made: list[tuple[int, str]] = []
        for _, alike in groupby(events, key=lambda event: event.operator):
            parts = [*alike]
            end += len(parts)
            # Of a linear layer the bias comes first: its weight's gradient is transposed by one more operator.
            for event in sorted(parts, key=lambda event: len(program.storages[event.storage].shape) > 1):
                if event.sign > 0 and event.storage in gradients:
                    name = program.storages[event.storage].parameter or str(event.storage)
                    made.append((event.storage, name))
                    ends[name] = end
        for storage, name in made:
            found.setdefault(ends[name], []).append(storage)
        return found
