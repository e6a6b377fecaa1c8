"""Micro-batches with repeated requests: recorded once, then copied for new storages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from memcalc.simulation.forward_backward import ForwardBackward
from memcalc.stream.requests import RecordedRequests, Requests

Part = Literal["forward", "loss", "end of scoring", "backward", "release"]


class MicroBatch:
    """A micro-batch, simulated the first time and copied afterwards.

    The requests of a micro-batch depend on whether gradients exist, so there is one `MicroBatch` for each case. They
    also depend on whether a thread has a cuBLAS workspace, which is allocated once (`Requests.take_once`).
    """

    def __init__(self, requests: Requests, passing: ForwardBackward) -> None:
        self.requests = requests
        self.passing = passing
        self.written: dict[Part, RecordedRequests] = {}
        self.new: dict[int, int] = {}  # maps storages of the first micro-batch to storages of the current one
        self.gradients: list[int] | None = None  # the storages of the first micro-batch, once it has finished
        self.outputs: list[int] = []  # outputs of the first micro-batch that are still referenced

    def forward(self) -> None:
        """Run forward until the model returns its logits."""
        self.new = {}
        self._write("forward", self.passing.forward)

    def loss(self) -> None:
        """Run the loss until backward begins."""
        self._write("loss", self.passing.loss)

    def end_scoring(self) -> None:
        """Free what was live while a reference scored the micro-batch."""
        self._write("end of scoring", self.passing.end_scoring)

    def backward(self) -> list[int]:
        """Run backward and return the storages of all gradients."""
        if self.gradients is None:
            mark = self.requests.mark()
            self.gradients = self.passing.backward()
            self.written["backward"] = self.requests.since(mark)
            return self.gradients
        self.requests.again(self.written["backward"], self.new)
        return [self.new[gradient] for gradient in self.gradients]

    def release(self, *, keeps_output: bool = False) -> list[int]:
        """Free tensors as `ForwardBackward.release`; return the storages that are still referenced."""
        if "release" in self.written:
            self.requests.again(self.written["release"], self.new)
            return [self.new[output] for output in self.outputs]
        mark = self.requests.mark()
        self.outputs = self.passing.release(keeps_output=keeps_output)
        self.written["release"] = self.requests.since(mark)
        return self.outputs

    def _write(self, part: Part, walk: Callable[[], None]) -> None:
        if part in self.written:
            self.requests.again(self.written[part], self.new)
            return
        mark = self.requests.mark()
        walk()
        self.written[part] = self.requests.since(mark)
