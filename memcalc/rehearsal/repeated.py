"""Stretches of a run that come again: written once, then copied with new storages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from memcalc.rehearsal.passing import Passing
from memcalc.stream.requests import Requests, Written

Part = Literal["forward", "loss", "backward", "release"]


class MicroBatch:
    """A kind of micro-batch: walked through the first time, copied every other time.

    What a micro-batch asks for depends on whether gradients exist, for each of which there is a `MicroBatch`, and on
    whether a thread has a workspace of cuBLAS: that is asked for once (`Requests.take_once`).

    Args:
        requests: where they are written.
        passing: the step to walk through.
    """

    def __init__(self, requests: Requests, passing: Passing) -> None:
        self.requests = requests
        self.passing = passing
        self.written: dict[Part, Written] = {}
        self.new: dict[int, int] = {}  # the storages of the micro-batch under way, by those of the first one
        self.gradients: list[int] | None = None  # of the first one, when that has passed

    def forward(self) -> None:
        """Until the model returns its logits."""
        self.new = {}
        self._write("forward", self.passing.forward)

    def loss(self) -> None:
        """Until backward begins."""
        self._write("loss", self.passing.loss)

    def backward(self) -> list[int]:
        """Until all gradients are there, which are the answer."""
        if self.gradients is None:
            mark = self.requests.mark()
            self.gradients = self.passing.backward()
            self.written["backward"] = self.requests.since(mark)
            return self.gradients
        self.requests.again(self.written["backward"], self.new)
        return [self.new[gradient] for gradient in self.gradients]

    def release(self) -> None:
        """What the script holds until backward has returned."""
        self._write("release", self.passing.release)

    def _write(self, part: Part, walk: Callable[[], None]) -> None:
        if part in self.written:
            self.requests.again(self.written[part], self.new)
            return
        mark = self.requests.mark()
        walk()
        self.written[part] = self.requests.since(mark)
