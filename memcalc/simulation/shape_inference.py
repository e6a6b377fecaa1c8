"""PyTorch's first pass over a pipeline stage, which infers the shapes of what the stages send to each other.

A script that does not tell `PipelineStage` the shapes, as torchtitan's, runs one micro-batch through all chunks of the
stage before the first step: forward of each chunk, then backward from the last chunk on, to the chunk's input alone.
A chunk with the embedding has no backward, because its input has no gradient. FSDP2 runs as without a schedule: each
unit is gathered on the all-gather stream before its forward, and resharded after its backward.

Source: torch 2.13 distributed/pipelining/schedules.py, _initialize_pp_stages; stage.py, _forward_metadata_inference,
_backward_metadata_inference, _post_metadata_inference_cleanup.
"""

from __future__ import annotations

from memcalc.layout.schedules import VOTES_SINCE
from memcalc.simulation.forward_backward import ForwardBackward
from memcalc.spec.spec import Spec
from memcalc.stream.requests import Requests


def infers_shapes(spec: Spec) -> bool:
    """Return whether the script leaves the shapes of what stages send to PyTorch.

    Source: torchtitan 0.2.2 distributed/pipeline_parallel.py, pipeline_module_split: PipelineStage without input_args.
    """
    return spec.training.framework == "torchtitan" and spec.training.torch >= VOTES_SINCE


class ShapeInference:
    """The first pass over one chunk.

    Args:
        requests: where it is recorded.
        passing: forward and backward of the chunk, for the gradient of its input alone.
        sent_bytes: of the tensor that a stage sends for a micro-batch.
    """

    def __init__(self, requests: Requests, passing: ForwardBackward, sent_bytes: int) -> None:
        self.requests = requests
        self.passing = passing
        self.sent_bytes = sent_bytes
        self.stage = passing.parts.stage
        self.held: list[int] = []  # the chunk's input and output, referenced until backward has returned

    def forward(self) -> None:
        """Run the chunk with an input of no values."""
        given = -1
        if not self.stage.has_embedding:
            given = self.requests.take(self.sent_bytes)
            self.requests.hold(given)  # forward takes over one owner
            self.held.append(given)
        self.passing.engine.begin_inference()
        self.passing.forward(given)
        if not self.stage.has_head:
            self.held.append(self.passing.output)

    def backward(self) -> None:
        """Compute the gradient of the chunk's input, if it has one, from a gradient of ones; then free the graph."""
        gradient = -1
        if self.stage.has_head:
            self.passing.loss()
        else:
            gradient = self.requests.take(self.sent_bytes)
        if not self.stage.has_embedding:
            if gradient >= 0:
                self.requests.hold(gradient)
            self.passing.backward(gradient)
            self.requests.drop((self.passing.input_gradient,))
        self.requests.drop((gradient,) if gradient >= 0 else ())
        self.passing.release()
        self.requests.drop(self.held)

    def reshard(self) -> None:
        """Free what FSDP2 has left gathered."""
        self.passing.engine.end_inference()
