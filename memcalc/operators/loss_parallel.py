"""Cross-entropy of vocabulary-parallel logits under PyTorch's `loss_parallel()`."""

from __future__ import annotations

from memcalc.ledger.component import Component
from memcalc.operators.base import Base
from memcalc.programs.tape import NEW, SAME, BackwardMemory, ForwardMemory, Node, Tensor

LOSS_PARALLEL = "torch 2.13 torch/distributed/tensor/parallel/loss.py"


class LossParallel(Base):
    """log_softmax and nll_loss as the separate operators of PyTorch's implementation."""

    def loss_parallel(self, logits: Tensor) -> Tensor:
        """Mean cross-entropy of fp32 logits; saves their log-probabilities.

        Args:
            logits: the rank's columns, (b, s, V/t).
        """
        log_probabilities = self._log_softmax(logits)
        tape = self.tape
        rows = logits.shape[:-1]

        def small(name: str, *dtypes: str) -> tuple[int, ...]:
            citation = f"{LOSS_PARALLEL}: {name}"
            return tuple(
                tape.store(f"{name} {number}", rows, dtype, citation, component=Component.LOGITS_AND_LOSS)
                for number, dtype in enumerate(dtypes, 1)
            )

        def large(name: str) -> int:
            citation = f"{LOSS_PARALLEL}: _nll_loss_and_log_softmax_backward"
            return tape.store(name, logits.shape, "fp32", citation, component=Component.LOGITS_AND_LOSS)

        # grad_input, exp(x) and their sum; exp(x) is freed before the product, which is the gradient
        columns, exponentials, total = map(large, ("gradient of the labels' columns", "probabilities", "their sum"))
        # safe_target, masked_safe_target, mask, grad_update, arange_1d, grad_output by row
        by_row = small("labels and gradients", "int64", "int64", "bool", "fp32", "int64", "fp32")
        loss = tape.new("loss", (), "fp32", f"{LOSS_PARALLEL}: _nll_loss_forward")
        weight = tape.store("loss total weight", (), "fp32", f"{LOSS_PARALLEL}: _nll_loss_forward")
        tape.record(
            Node(
                "nll_loss",
                (log_probabilities,),
                (loss,),
                (log_probabilities.storage, weight),
                (NEW,),
                forward=ForwardMemory(
                    also=(weight,),
                    # safe_target, safe_target_partial_, result_partial, result_reduced; the negated result, where, mask
                    temporaries=small("labels and losses", "int64", "int64", "fp32", "fp32", "fp32", "fp32", "bool"),
                ),
                referenced_by_caller=(logits.storage,),  # the argument of cross_entropy
                backward=BackwardMemory(
                    prepares=(*((index, 1) for index in (columns, *by_row, exponentials, total)), (exponentials, -1)),
                    between=tuple((index, -1) for index in (columns, *by_row, total)),
                ),
            )
        )
        tape.hold(loss)
        return loss

    def _log_softmax(self, logits: Tensor) -> Tensor:
        """log_softmax as its operators: logits minus the row maximum, exponentials, logarithms.

        _log_softmax_backward_handler passes on the gradient of nll_loss.
        """
        tape = self.tape
        citation = f"{LOSS_PARALLEL}: _log_softmax"

        def row(name: str) -> int:
            return tape.store(f"{name} of each row", logits.shape[:-1], logits.dtype, citation)

        shifted = tape.new("logits less their maximum", logits.shape, logits.dtype, citation)
        tape.record(
            Node(
                "log_softmax: shift",
                (logits,),
                (shifted,),
                (),
                (SAME,),
                forward=ForwardMemory(temporaries=(row("maximum"),)),
            )
        )
        total = tape.new("sum of each row", logits.shape[:-1], logits.dtype, citation, grad=False)
        exponentials = tape.store("exponentials", logits.shape, logits.dtype, citation)
        tape.record(
            Node(
                "log_softmax: sum",
                (shifted,),
                (total,),
                (),
                (None,),
                forward=ForwardMemory(temporaries=(exponentials,)),
            ),
        )
        result = tape.new("log-probabilities", logits.shape, logits.dtype, citation)
        logarithm = row("logarithm of the sum")
        tape.record(
            Node(
                "log_softmax",
                (shifted, total),
                (result,),
                (result.storage,),
                (SAME, None),
                forward=ForwardMemory(temporaries=(logarithm,)),
            )
        )
        return result
