"""Kullback-Leibler divergence of a student's logits from those of a teacher, which another program has computed."""

from __future__ import annotations

from memcalc.operators.loss import Loss
from memcalc.programs.tape import ALIAS, NEW, SAME, ForwardMemory, Node, Tensor

SOURCE = "torchtune 0.6.1 modules/loss/kd_losses.py"


class DivergenceLoss(Loss):
    """Kullback-Leibler divergence of fp32 probabilities, for each chunk of logits.

    The teacher's logits require no gradient, so autograd saves what gradients of the student's logits need.
    """

    def rows_of(self, logits: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """View each chunk as rows: backward sums the gradients of several views of a chunk in a new tensor.

        A loss makes its views before it reads any of them, so the sums follow the backward of all chunks.
        """
        views = tuple(Tensor(each.storage, each.shape, each.dtype) for each in logits)
        for each, view in zip(logits, views, strict=True):
            self.tape.record(Node("rows of logits", (each,), (view,), (), (ALIAS,)))
        return views

    def divergence(self, logits: tuple[Tensor, ...], kind: str, of_teacher: str) -> Tensor:
        """Return the sum of the divergences of all chunks.

        Args:
            logits: the student's, as rows.
            kind: as `training.divergence`.
            of_teacher: dtype of the teacher's logits.
        """
        functions = {
            "forward": (self._forward,),
            "reverse": (self._reverse,),
            "symmetric": (self._forward, self._reverse),
        }
        losses = [function(each, of_teacher) for each in logits for function in functions[kind]]
        total = self.tape.new("divergence", (), "fp32", SOURCE)
        self.tape.record(Node("sum of divergences", tuple(losses), (total,), (), (SAME,) * len(losses)))
        return total

    def add_losses(self, *losses: Tensor) -> None:
        """Add up weighted losses of the same logits."""
        total = self.tape.new("sum of losses", (), "fp32", SOURCE)
        self.tape.record(Node("sum of losses", losses, (total,), (), (NEW,) * len(losses)))
        for loss in (total, *losses):
            self.tape.hold(loss)

    def _forward(self, logits: Tensor, of_teacher: str) -> Tensor:
        """ForwardKLLoss: the student's log-probabilities, weighted with the teacher's probabilities."""
        weights = self._of_teacher(logits, of_teacher, "probabilities")
        infinite = self._infinite(logits, logits.dtype, "the student's")
        found = self._of_student(logits, "log-probabilities")
        return self._masked_sum(self._product(found, weights), infinite)

    def _reverse(self, logits: Tensor, of_teacher: str) -> Tensor:
        """ReverseKLLoss: both log-probabilities, weighted with the student's probabilities."""
        weights = self._of_student(logits, "probabilities")
        found = self._of_student(logits, "log-probabilities")
        others = self._of_teacher(logits, of_teacher, "log-probabilities")
        own = self._infinite(logits, logits.dtype, "the student's")
        theirs = self._infinite(logits, of_teacher, "the teacher's")
        infinite = Tensor(self.tape.store("infinite logits", logits.shape, "bool", SOURCE), logits.shape, "bool", False)
        self.tape.record(Node("infinite logits", (own, theirs), (infinite,), (), (None, None)))
        cross = self._masked(self._product(weights, others), infinite)
        entropy = self._masked(self._product(weights, found), infinite)
        tape = self.tape
        difference = Tensor(cross.storage, cross.shape, cross.dtype)  # prod_probs -= ...
        tape.record(Node("difference of products", (cross, entropy), (difference,), (), (SAME, NEW)))
        return self._sum(difference)

    def _of_teacher(self, logits: Tensor, dtype: str, what: str) -> Tensor:
        """Return what (log_)softmax makes of the teacher's logits, of which it first makes an fp32 copy."""
        tape = self.tape
        wide: tuple[Tensor, ...] = ()
        if dtype != "fp32":
            wide = (tape.new("teacher's logits in fp32", logits.shape, "fp32", SOURCE, grad=False),)
            tape.record(Node("teacher's logits in fp32", (), wide, (), ()))
        found = tape.new(f"teacher's {what}", logits.shape, "fp32", SOURCE, grad=False)
        tape.record(Node(f"teacher's {what}", wide, (found,), (), (None,) * len(wide)))
        return found

    def _of_student(self, logits: Tensor, what: str) -> Tensor:
        """Return what (log_)softmax makes of an fp32 copy of the student's logits; it saves its result."""
        wide = self.cast(logits, "fp32", "student's logits in fp32")
        found = self.tape.new(f"student's {what}", logits.shape, "fp32", SOURCE)
        self.tape.record(Node(f"student's {what}", (wide,), (found,), (found.storage,), (NEW,)))
        return found

    def _infinite(self, logits: Tensor, dtype: str, of: str) -> Tensor:
        """Return which logits are infinite: torch compares their absolute values."""
        tape = self.tape
        sizes = tape.new(f"absolute values of {of} logits", logits.shape, dtype, SOURCE, grad=False)
        tape.record(Node(f"absolute values of {of} logits", (), (sizes,), (), ()))
        found = Tensor(tape.store(f"{of} infinite logits", logits.shape, "bool", SOURCE), logits.shape, "bool", False)
        tape.record(Node(f"{of} infinite logits", (sizes,), (found,), (), (None,)))
        return found

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply; each factor is saved if the other one requires a gradient."""
        saved = tuple(each.storage for each, other in ((a, b), (b, a)) if other.grad)
        gradients = tuple(NEW if each.grad else None for each in (b, a))
        return self.result("products of probabilities", a.shape, "fp32", (b, a), saved, gradients, citation=SOURCE)

    def _masked(self, products: Tensor, infinite: Tensor) -> Tensor:
        found = self.tape.new("masked products", products.shape, "fp32", SOURCE)
        self.tape.record(Node("masked products", (products,), (found,), (infinite.storage,), (NEW,)))
        return found

    def _masked_sum(self, products: Tensor, infinite: Tensor) -> Tensor:
        return self._sum(self._masked(products, infinite))

    def _sum(self, products: Tensor) -> Tensor:
        """Sum over the vocabulary, then over tokens with a label; a variable references the products until the end."""
        tape, rows = self.tape, products.shape[:1]
        each = tape.new("divergence of each token", rows, "fp32", SOURCE)
        tape.record(Node("sum over the vocabulary", (products,), (each,), (), (SAME,)))
        counted = tape.store("whether a token has a label", rows, "int32", SOURCE)
        labeled = tape.new("divergence of each label", rows, "fp32", SOURCE)
        tape.record(
            Node(
                "product with the mask", (each,), (labeled,), (counted,), (NEW,), forward=ForwardMemory(also=(counted,))
            )
        )
        total = tape.new("divergence of a chunk", (), "fp32", SOURCE)
        tape.record(Node("sum over tokens", (labeled,), (total,), (), (SAME,)))
        tape.still_referenced(products)
        return total
