"""Micro-batches in flight: each part is simulated for the first of them, and copied for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from memcalc.simulation.forward_backward import ForwardBackward
from memcalc.stream.requests import RecordedRequests, Requests

Part = Literal["forward", "loss", "backward", "release"]


class Repeated(NamedTuple):
    """A part that was simulated once.

    Args:
        written: the recorded requests.
        result: storages that the part returns.
        owners: number of owners that it adds to live storages of earlier parts.
    """

    written: RecordedRequests
    result: list[int]
    owners: dict[int, int]


class Recorded:
    """The parts of one chunk's micro-batches, which depend only on whether gradients exist."""

    def __init__(self, requests: Requests, passing: ForwardBackward) -> None:
        self.requests = requests
        self.passing = passing
        self.written: dict[Part, Repeated] = {}
        self.made: list[int] = []  # storages of all its parts so far

    def play(self, part: Part, new: dict[int, int], walk: Callable[[], list[int]]) -> list[int]:
        """Record a part; return its resulting storages.

        Args:
            part: name of the part.
            new: maps storages of the first micro-batch to storages of this one.
            walk: function that simulates the part.
        """
        if part not in self.written:
            mark, before = self.requests.mark(), self.requests.owners(self.made)
            result = walk()
            after = self.requests.owners(self.made)
            added = {each: after[each] - before[each] for each in self.made if after[each] not in (0, before[each])}
            repeated = self.written[part] = Repeated(self.requests.since(mark), result, added)
            self.made += repeated.written.made
            return result
        repeated = self.written[part]
        self.requests.again(repeated.written, new)
        for storage, owners in repeated.owners.items():
            self.requests.hold(new[storage], owners)
        return [new.get(storage, storage) for storage in repeated.result]


class InFlight:
    """One micro-batch on one chunk of layers, from the begin of its forward to the end of its backward.

    Args:
        recorded: the recorded parts of the chunk.
        received: storage of the input from the previous stage; -1: this chunk has the embedding.
    """

    def __init__(self, recorded: Recorded, received: int) -> None:
        self.recorded = recorded
        self.received = received
        self.new: dict[int, int] = {}
        self.output: list[int] = []  # storages sent to the next stage, live until backward has returned

    def forward(self) -> int | None:
        """Run forward; return the storage that is sent to the next stage, if there is one."""
        passing, has_head = self.recorded.passing, self.recorded.passing.parts.stage.has_head

        def walk() -> list[int]:
            self._hold(self.received)
            passing.forward(self.received)
            return [] if has_head else [passing.output]

        self.output = self.recorded.play("forward", self.new, walk)
        return self.output[0] if self.output else None

    def loss(self) -> None:
        """Run the loss."""

        def walk() -> list[int]:
            self.recorded.passing.loss()
            return []

        self.recorded.play("loss", self.new, walk)

    def backward(self, gradient: int) -> tuple[list[int], list[int]]:
        """Run backward; return the storages of all parameter gradients, and the input's gradient if it is sent back."""
        passing = self.recorded.passing

        def walk() -> list[int]:
            self._hold(gradient)
            gradients = passing.backward(gradient)
            sent = [] if passing.parts.stage.has_embedding else [passing.input_gradient]
            return [*sent, *gradients]

        found = self.recorded.play("backward", self.new, walk)
        sent = 0 if passing.parts.stage.has_embedding else 1
        return found[sent:], found[:sent]

    def release(self, *, keeps_output: bool = True) -> list[int]:
        """Free the tensors that the stage references until backward returns; return the storages of logits and loss.

        Args:
            keeps_output: whether the stage still references logits and loss; otherwise they are freed, too.
        """
        passing = self.recorded.passing
        self.recorded.requests.drop(self.output)
        return self.recorded.play("release", self.new, lambda: passing.release(keeps_output=keeps_output))

    def _hold(self, storage: int) -> None:
        """Add an owner to the receive buffer, which stays when the block that takes it over drops one."""
        if storage >= 0:
            self.recorded.requests.hold(storage)
