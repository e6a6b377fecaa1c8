"""The cross-entropy of logits."""

from __future__ import annotations

from memcalc.estimation.operators.base import DERIVATIVES, Base
from memcalc.estimation.tape import NEW, Node, Tensor


class Loss(Base):
    """The cross-entropy of logits."""

    def cross_entropy(self, logits: Tensor, of: str = "") -> Tensor:
        """log_softmax, which keeps its output, then the mean of the labels' rows, which keeps it too."""
        tape = self.tape
        log_probabilities = tape.new("log-probabilities", logits.shape, logits.dtype, DERIVATIVES)
        tape.record(Node(f"log_softmax{of}", (logits,), (log_probabilities,), (log_probabilities.storage,), (NEW,)))
        loss = tape.new("loss", (), "fp32", DERIVATIVES)
        weight = tape.store("loss total weight", (), "fp32", "ATen native/cuda/Loss.cu")
        tape.record(
            Node(
                f"nll_loss{of}",
                (log_probabilities,),
                (loss,),
                (log_probabilities.storage, weight),
                (NEW,),
                also_allocates=(weight,),
                caller_holds=(logits.storage,),
            )
        )
        tape.hold(loss)
        return loss
