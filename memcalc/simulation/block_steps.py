"""The events of a stage's blocks, prepared once for all identical layers: what each allocates or frees."""

from __future__ import annotations

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
    """

    def __init__(self, parts: StageBlocks, *, splits_workspaces: bool = True) -> None:
        self.parts = parts
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
        embedding's gradient has been added to it.
        """
        if number in self._ready:
            return self._ready[number]
        program, steps = self.parts.blocks[number].program, self.of(number, "backward")
        found = self._ready[number] = {}
        for position, (event, *_) in enumerate(steps):
            made = event.sign > 0 and program.storages[event.storage].component is Component.GRADIENTS
            if made and event.storage != program.tied_gradient:
                following = range(position + 1, len(steps))
                end = next((at for at in following if steps[at].event.operator != event.operator), len(steps))
                found.setdefault(end, []).append(event.storage)
        return found
