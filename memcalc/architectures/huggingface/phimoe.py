"""Phi-3.5-MoE: experts sampled one at a time, with a custom gradient (sparsemixer)."""

from __future__ import annotations

from memcalc.architectures.huggingface.mixtral import Mixtral
from memcalc.architectures.huggingface.modules.experts import COPIES
from memcalc.programs.tape import Tensor

SCORES = ("b", "s", "E")
ONE = ("b", "s", "1")


class PhiMoe(Mixtral):
    """PhimoeDecoderLayer and sparsemixer, which references its tensors until both experts of a token are sampled."""

    # of the previous sample: mask_logits_threshold and max_ind, max_scores, and factor
    threshold: tuple[Tensor, ...] = ()
    best_score: tuple[Tensor, ...] = ()
    factor: tuple[Tensor, ...] = ()
    others: tuple[Tensor, ...] = ()  # variables that live until both experts are sampled

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """PhimoeTopKRouter, in the dtype of its logits."""
        c, ops = self.c, self.ops
        logits = ops.linear(x, "mlp.router", ("E", "d"), SCORES, bias=c.experts.router_bias)
        first, chosen_first = self.sample_expert(logits, logits, "first")
        others = ops.overwritten(logits, chosen_first, "scores without the first")
        second, chosen_second = self.sample_expert(logits, others, "second")
        weights = ops.concatenate((first, second), COPIES, "router weights")
        chosen = ops.table("chosen experts", COPIES, "int64", "aten::cat")
        variables = (*self.threshold, *self.best_score, *self.factor, *self.others)
        self.tape.still_referenced(others, second, chosen_first, chosen_second, *variables)
        return logits, weights, chosen

    def sample_expert(self, logits: Tensor, scores: Tensor, which: str) -> tuple[Tensor, Tensor]:
        """Sample one expert: its weight, with a gradient to the logits through PhimoeMultiplier only, and its index."""
        ops, tape = self.ops, self.tape
        mask, best_at = self.out_of_reach(scores.dtype, which)
        masked = ops.filled(scores, mask, f"{which} masked scores")
        chosen = self.sampled(scores.dtype, which)
        probabilities = ops.softmax(masked, f"{which} probabilities")
        tape.still_referenced(masked)
        weight = ops.gather(probabilities, ONE, f"{which} probability", values=True, index=chosen)
        best, at = self.largest(f"{which} largest probability", probabilities.dtype)
        tape.still_referenced(best_at, *self.best_score)
        tape.referenced_by_graph(*self.threshold[1:])
        self.best_score, self.threshold = (best,), (mask, at)
        same = ops.table(f"{which} choice is the best", ONE, "bool")
        chances = ops.table(f"{which} chances", ONE, probabilities.dtype)
        lucky = ops.table(f"{which} chances taken", ONE, "bool")
        tape.still_referenced(chances)
        either = ops.table(f"{which} mask for one", ONE, "bool")
        tape.still_referenced(same, lucky)
        factors = wide = ops.table(f"{which} factors", ONE, "fp32")
        if probabilities.dtype != "fp32":
            factors = ops.table(f"{which} factors in {probabilities.dtype}", ONE, probabilities.dtype)
        tape.still_referenced(either, wide)
        multiplier = ops.sparse_multiplier(logits, weight, chosen, probabilities, f"{which} weight")
        self.others += (probabilities, weight, factors)
        return multiplier, chosen

    def out_of_reach(self, dtype: str, which: str) -> tuple[Tensor, Tensor]:
        """The mask of scores too far below the maximum, and the maximum's index; without gradient."""
        ops, tape = self.ops, self.tape
        best, best_at = self.largest(f"{which} best score", dtype)
        tape.still_referenced(*self.threshold)
        absolute = ops.table(f"{which} absolute scores", SCORES, dtype)
        factor = ops.table(f"{which} divisors", SCORES, dtype)
        tape.still_referenced(absolute, *self.factor)
        distances = ops.table(f"{which} distances", SCORES, dtype)
        relative = ops.table(f"{which} relative distances", SCORES, dtype)
        tape.still_referenced(distances)
        mask = ops.table(f"{which} mask", SCORES, "bool")
        tape.still_referenced(best, relative)
        self.factor = (factor,)
        return mask, best_at

    def sampled(self, dtype: str, which: str) -> Tensor:
        """The index of the best noisy score; without gradient. The logarithm is on autocast's fp32 list."""
        ops, tape = self.ops, self.tape
        noise = ops.table(f"{which} noise", SCORES, dtype)
        dtype = "fp32" if self.c.dtypes.autocast else dtype
        logarithm = ops.table(f"{which} logarithm of noise", SCORES, dtype, of=(ops.cast(noise, dtype),))
        tape.still_referenced(noise)
        noisy = ops.table(f"{which} noisy scores", SCORES, dtype, of=(logarithm,))
        best, chosen = self.largest(f"{which} best noisy score", dtype)
        tape.still_referenced(noisy, best)
        return chosen

    def largest(self, name: str, dtype: str) -> tuple[Tensor, Tensor]:
        """max(dim=-1) of each token."""
        best = self.ops.table(name, ONE, dtype)
        at = self.ops.table(f"{name}: its index", ONE, "int64")
        self.tape.still_referenced(best)
        return best, at
