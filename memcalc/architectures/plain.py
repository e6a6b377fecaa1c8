"""The plain implementation on a tape: the reference decoder (memcalc/step/reference/decoder.py), operator by operator.

A GPT layer sums to the 34bsd + 5bs²h bytes of Korthikanti et al. (arXiv 2205.05198), section 4.1, plus the statistics
of its norms; with tensor and sequence parallelism to their table 2.
"""

from __future__ import annotations

from memcalc.architectures.norms import norm
from memcalc.architectures.plain_attention import PlainAttention
from memcalc.architectures.plain_embedding_head import PAPER
from memcalc.architectures.plain_mlp import PlainMlp
from memcalc.architectures.structure import BlockStructure
from memcalc.architectures.tensor_parallel import TensorParallelOps
from memcalc.operators import Operators
from memcalc.programs.tape import Tape, Tensor


class PlainBlock:
    """Writer of one layer; `axis` returns a tensor-parallel axis.

    Args:
        structure: the options of the modules.
        experts: whether this layer's MLP is a mixture of experts.
    """

    def __init__(self, structure: BlockStructure, *, experts: bool) -> None:
        self.c = structure
        self.experts = experts
        self.weights: tuple[Tensor, ...] = ()  # attention weights, which transformers' modules return
        self.tape = Tape()
        if structure.saving.reentrant:
            self.tape.checkpoints.stops_early, self.tape.checkpoints.reentrant = False, True
        self.ops = Operators(self.tape, structure.dtypes, structure.linears)
        self.split = TensorParallelOps(self.ops, structure)
        self.axis = structure.sharding.axis
        self.stream = self.split.stream

    def layer(self) -> tuple[Tape, Tensor]:
        """Return the tape of a layer, and its output."""
        c, ops = self.c, self.ops
        dtype = c.stream
        shape, grad, leaf = ("b", self.stream, "d"), not c.layer.detached, c.layer.reads_leaf
        x = self.tape.input("layer input", shape, dtype, PAPER, grad=grad, leaf=leaf)
        before = c.residual.norms == 4 or c.residual.norm_placement == "before"
        normed = norm(ops, c.norm, x, "input_norm") if before else x
        attended = PlainAttention(self).output(normed)
        if c.residual.norms == 4 or not before:
            attended = norm(ops, c.norm, attended, "attention_output_norm")
        attended = ops.dropout(attended, "attention dropout", c.residual.dropout)
        self.split.returned(normed)
        if c.implementation == "huggingface" and c.residual.parallel:
            return self.tape, self.side_by_side(x, normed, attended)
        into = ops.add(x, attended, "attention sum")
        given = x if c.residual.parallel else into
        named = (normed, attended) if c.residual.parallel else ()  # referenced until the layer returns
        if not before:
            normed = given
        elif c.residual.norms > 1:
            normed = norm(ops, c.norm, given, "post_attention_norm")
        fed = PlainMlp(self).output(normed)
        if c.residual.norms == 4 or not before:
            fed = norm(ops, c.norm, fed, "mlp_output_norm")
        fed = ops.dropout(fed, "mlp dropout", c.residual.dropout)
        self.split.returned(normed)
        output = ops.add(into, fed, "layer output")
        self.split.returned(*named)
        if c.implementation == "huggingface":
            # the model's loop references the input, the layer what attention returns
            self.split.returned(x, *self.weights)
        return self.tape, output

    def side_by_side(self, x: Tensor, normed: Tensor, attended: Tensor) -> Tensor:
        """transformers' parallel blocks: three summands, added when all exist."""
        given = normed if self.c.residual.norms == 1 else norm(self.ops, self.c.norm, x, "post_attention_norm")
        fed = PlainMlp(self).output(given)
        output = self.ops.add(self.ops.add(x, attended, "attention sum"), fed, "layer output")
        self.split.returned(x, normed, attended, given, *self.weights)
        return output
