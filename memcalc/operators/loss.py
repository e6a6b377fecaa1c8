"""Cross-entropy of logits."""

from __future__ import annotations

from memcalc.ledger.component import Component
from memcalc.operators.base import DERIVATIVES, Base
from memcalc.programs.tape import NEW, ForwardMemory, Node, Tensor


class Loss(Base):
    """Cross-entropy of logits."""

    def shifted_labels(self, *, batched: bool) -> Tensor:
        """Pad the labels by one per sequence, then drop the first: a copy, or a view for a single sequence.

        Source: transformers 5.23 loss/loss_utils.py, ForCausalLMLoss.
        """
        tape, citation = self.tape, "transformers 5.23 loss/loss_utils.py"
        found: tuple[Tensor, ...] = ()
        shapes = {"labels, padded": ("b", "s+1"), "labels, shifted": ("b", "s")}
        for name, shape in shapes.items():
            if found and not batched:
                break
            storage = tape.store(name, shape, "int64", citation, component=Component.LOGITS_AND_LOSS)
            y = Tensor(storage, shape, "int64", grad=False)
            tape.record(Node(name, found, (y,), (), (None,) * len(found)))
            found = (*found, y)
        self._labels = found
        return found[-1]

    def shifted_logits(self, logits: Tensor, *, batched: bool) -> tuple[Tensor, str, Tensor | None]:
        """Copy the logits of all tokens but each sequence's last, and the labels of all but the first.

        For a single sequence both are views. Backward of the slice fills zeros of the logits' shape.

        Returns:
            The arguments of `cross_entropy`.

        Source: transformers 4.48 loss/loss_utils.py, ForCausalLMLoss.
        """
        tape, citation = self.tape, "transformers 4.48 loss/loss_utils.py"
        shape = ("b", "s-1", *logits.shape[2:])
        if batched:
            y = tape.new("logits, shifted", shape, logits.dtype, citation)
        else:
            y = Tensor(logits.storage, shape, logits.dtype)
        tape.record(Node("logits, shifted", (logits,), (y,), (), (NEW,)))
        if not batched:
            return y, "", None
        storage = tape.store("labels, shifted", ("b", "s-1"), "int64", citation, component=Component.LOGITS_AND_LOSS)
        labels = Tensor(storage, ("b", "s-1"), "int64", grad=False)
        tape.record(Node("labels, shifted", (), (labels,), (), ()))
        self._labels = (logits, labels)
        return y, "", labels

    _labels: tuple[Tensor, ...] = ()  # variables of the loss function

    def cross_entropy(self, logits: Tensor, of: str = "", labels: Tensor | None = None, dtype: str = "") -> Tensor:
        """log_softmax, which saves its output, then the mean negative log-likelihood, which saves it too.

        `labels`: labels created for the loss. `dtype`: dtype that nll_loss reads; default: that of the logits.
        Under autocast nll_loss is in the fp32 list (autocast_mode.h) and casts the log-probabilities. F.cross_entropy
        calls log_softmax below autocast, which therefore keeps the dtype of the logits.
        """
        tape = self.tape
        log_probabilities = tape.new("log-probabilities", logits.shape, logits.dtype, DERIVATIVES)
        tape.record(Node(f"log_softmax{of}", (logits,), (log_probabilities,), (log_probabilities.storage,), (NEW,)))
        log_probabilities = self.cast(log_probabilities, dtype or logits.dtype, "log-probabilities in fp32")
        loss = tape.new("loss", (), "fp32", DERIVATIVES)
        weight = tape.store("loss total weight", (), "fp32", "ATen native/cuda/Loss.cu")
        tape.record(
            Node(
                f"nll_loss{of}",
                (log_probabilities,),
                (loss,),
                (log_probabilities.storage, *(() if labels is None else (labels.storage,)), weight),
                (NEW,),
                forward=ForwardMemory(also=(weight,)),
                referenced_by_caller=(logits.storage, *(each.storage for each in self._labels)),
            )
        )
        tape.hold(loss)
        return loss
