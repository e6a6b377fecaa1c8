"""Losses that never store all logits: LM head and cross-entropy on chunks or tiles of tokens."""

from __future__ import annotations

from memcalc.operators.lora_linear import LoraLinear
from memcalc.operators.loss import Loss
from memcalc.programs.program import HEAD
from memcalc.programs.tape import (
    NEW,
    SAME,
    SUMMED,
    VIEW,
    BackwardMemory,
    CheckpointSegment,
    ForwardMemory,
    Node,
    Shape,
    Tensor,
)

TRL = "TRL 1.16 trl/kernels/chunked_logprob.py"
_SUMS = ("maximum", "sum", "weighted sum", "sum of squares", "sum of logits", "maximum before", "logit of the label")


class ChunkedLoss(LoraLinear, Loss):
    """LM head and cross-entropy together, on some of the tokens at a time."""

    def chunked_cross_entropy(self, x: Tensor, weight: Shape, chunks: int, *, bias: bool, tied: bool) -> None:
        """Checkpoint each chunk: its logits are freed after forward and recomputed in backward."""
        tape = self.tape
        parts = tuple(Tensor(x.storage, (axis, weight[1]), x.dtype) for axis in _chunks(chunks))
        tape.record(Node("chunks of tokens", (x,), parts, (), (NEW,)))
        shared = self._shared_casts(weight, bias=bias, tied=tied)
        losses: list[Tensor] = []
        of_chunks: list[list[Node]] = []
        for part in parts:
            start = len(tape.nodes)
            out = (part.shape[0], weight[0])
            if shared:
                logits = self._with_casts(part, shared, out)
            else:
                logits = self.linear(part, "lm_head", weight, out, bias=bias, tied=tied)
            losses.append(self.cross_entropy(self.cast(logits, "fp32", "logits in fp32"), of=" of a chunk"))
            of_chunks.append(tape.nodes[start:])
            tape.checkpoints.segments.append(CheckpointSegment(start, len(tape.nodes), (part.storage,)))
        self._add_up(of_chunks, tied=tied)
        self._sum_of(losses)

    def logits_by_chunk(
        self, x: Tensor, weight: Shape, chunks: int, *, bias: bool, tied: bool, dtype: str
    ) -> tuple[Tensor, ...]:
        """Run the LM head on each chunk of tokens; the logits stay live, cast to `dtype` if one is given.

        torchtune 0.6.1 modules/transformer.py, chunked_output; LitGPT 0.5.13 litgpt/model.py, lm_head_chunk_size.
        """
        tape = self.tape
        parts = tuple(Tensor(x.storage, (axis, weight[1]), x.dtype) for axis in _chunks(chunks))
        tape.record(Node("chunks of tokens", (x,), parts, (), (NEW,)))
        shared = self._shared_casts(weight, bias=bias, tied=tied)
        of_chunks: list[list[Node]] = []
        found: list[Tensor] = []
        for part in parts:
            start, out = len(tape.nodes), (part.shape[0], weight[0])
            if shared:
                logits = self._with_casts(part, shared, out)
            else:
                logits = self.linear(part, "lm_head", weight, out, bias=bias, tied=tied)
            found.append(logits)
            of_chunks.append(tape.nodes[start:])
        self._add_up(of_chunks, tied=tied)
        if dtype:  # the list references all chunks until the last one is cast
            wide = tuple(self.cast(logits, dtype, "logits in fp32") for logits in found)
            tape.still_referenced(*found)
            return wide
        return tuple(found)

    def chunks_of_logits(self, logits: Tensor, chunks: int) -> tuple[Tensor, ...]:
        """Views of all logits but those of each sequence's last token; backward fills zeros around their gradients.

        LitGPT 0.5.13 finetune/full.py and litgpt/utils.py, chunked_cross_entropy.
        """
        shifted = Tensor(logits.storage, ("b", "s-1", *logits.shape[2:]), logits.dtype)
        self.tape.record(Node("all tokens except the last", (logits,), (shifted,), (), (NEW,)))
        parts = tuple(Tensor(logits.storage, (axis, logits.shape[2]), logits.dtype) for axis in _chunks(chunks))
        self.tape.record(Node("chunks of logits", (shifted,), parts, (), (NEW,)))
        return parts

    def cross_entropy_by_chunk(self, logits: tuple[Tensor, ...]) -> Tensor:
        """Cross-entropy of one stored chunk at a time, each from an fp32 copy."""
        return self._sum_of(
            [self.cross_entropy(self.cast(each, "fp32", "logits in fp32"), of=" of a chunk") for each in logits]
        )

    def _sum_of(self, losses: list[Tensor]) -> Tensor:
        total = self.tape.new("loss", (), "fp32", "sum over chunks")
        self.tape.record(Node("sum over chunks", tuple(losses), (total,), (), (SAME,) * len(losses)))
        self.tape.hold(total)
        return total

    def _shared_casts(self, weight: Shape, *, bias: bool, tied: bool) -> list[Tensor]:
        """Return the casts of parameters that all chunks read from autocast's cache; none without a cache."""
        shared: list[Tensor] = []
        if self.autocast and self.trains("lm_head") and self.parameters == "fp32" != self.compute:
            if bias:  # autocast casts the last argument first
                gradient = self.parameter_gradient("lm_head", "bias", weight[:1], self.parameters)
                shared.append(self.cast_weight("lm_head", "bias", weight[:1], gradient))
            gradient = self.parameter_gradient("lm_head", "weight", weight, self.parameters)
            shared.append(self.cast_weight("lm_head", "weight", weight, gradient))
            if tied:
                self.tape.gradients.deferred.add(gradient)
                self.tape.gradients.tied = gradient
        return shared

    def _with_casts(self, x: Tensor, shared: list[Tensor], out: Shape) -> Tensor:
        """Apply the LM head with parameters cast and cached by autocast; recomputation casts them again.

        The graph is that of forward, so all gradients are accumulated at the first cast of each parameter, in its
        dtype. The weight is the last of `shared`.
        """
        for cast in shared:  # recomputed outside the graph: gradients go to the first cast
            again = Tensor(cast.storage, cast.shape, cast.dtype)
            self.tape.record(Node("lm_head cast", (), (again,), (), ()))
        x = self.autocast_input(x, "lm_head")
        y = self.tape.new("lm_head output", out, self.compute, "torch.nn.functional.linear")
        # A weight gradient is the transpose of a matmul's result, a bias gradient a view of a sum, see `linear`.
        inputs: tuple[Tensor, ...] = (*shared, x)
        kinds: tuple[str, ...] = (VIEW, NEW)
        sums: tuple[tuple[int, int], ...] = ()
        if len(shared) > 1:
            inputs, kinds = (x, *shared), (NEW, SUMMED, VIEW)
            sums = self.column_sum("lm_head", "bias", out[:1], out[1:])
        self.tape.record(
            Node(
                "lm_head",
                inputs,
                (y,),
                (x.storage, shared[-1].storage),
                kinds,
                backward=BackwardMemory(summed_later=sums),
                module=HEAD,
                multiplies=True,
            )
        )
        return y

    def _add_up(self, of_chunks: list[list[Node]], *, tied: bool) -> None:
        """Accumulate each parameter's gradient over the chunks; the last chunk comes first in backward.

        The first gradient of a weight is the transpose of a matmul's result, that of a bias a sum without its first
        axis: both are views, so nothing is accumulated into them in place. The sum of the first two is a third tensor,
        into which the others are accumulated, a bias's first (torch 2.13 autograd/input_buffer.cpp).
        """
        tape = self.tape
        totals: dict[str, int] = {}
        firsts: dict[str, int] = {}
        for nodes in reversed(of_chunks):
            for node in nodes:
                for gradient in reversed(node.parameters):
                    storage = tape.storages[gradient]
                    name = storage.parameter
                    tape.gradients.deferred.add(gradient)
                    if name not in firsts:
                        firsts[name] = totals[name] = gradient
                        continue
                    if totals[name] == firsts[name]:
                        tape.storages.append(storage)
                        totals[name] = len(tape.storages) - 1
                        added: tuple[int, ...] = (totals[name], firsts[name], gradient)
                    else:
                        added = (totals[name], gradient)
                    node.deferred = node.deferred._replace(sums=(*node.deferred.sums, added))
        if tied:  # the embedding's gradient is still to come
            tape.gradients.tied = totals.get(f"{HEAD}.weight", tape.gradients.tied)
        else:
            last = next((node for node in of_chunks[0] if node.parameters), of_chunks[0][0])
            last.deferred = last.deferred._replace(completes=tuple(totals.values()))

    def selective_log_softmax(self, logits: Tensor, *, copies: bool, averages: bool) -> Tensor:
        """The log-probabilities of labels by a kernel, from the logits without the last token's.

        axolotl 0.19 monkeypatch/trainer/utils.py, selective_log_softmax: `reshape` copies them, because the slice
        cannot be viewed as rows. Autograd saves the copy. trl 1.14 trl/kernels/logprob_entropy.py reads the slice,
        which is saved, and computes the entropy as well.

        For the log TRL averages the logits of the chosen completions, then of the rejected ones: an index copies them.
        Prompts, which have none, are counted, too (trl 1.9 and 1.14 trainer/dpo_trainer.py, _compute_loss).

        Args:
            logits: the logits.
            copies: whether the kernel is axolotl's.
            averages: whether the averages are counted.
        """
        tape = self.tape
        citation = "axolotl 0.19 monkeypatch/trainer/utils.py" if copies else "trl 1.14 trl/kernels/logprob_entropy.py"
        shape, of_token = ("b", "s-1", "V"), ("b", "s-1")
        if copies:
            rows = tape.new("logits of tokens with a label", shape, logits.dtype, citation, grad=logits.grad)
        else:
            rows = Tensor(logits.storage, shape, logits.dtype, logits.grad)
        tape.record(Node("logits of tokens with a label", (logits,), (rows,), (), (NEW,)))
        labels = [tape.store("labels of these tokens", of_token, "int64", citation)] if copies else []
        names = ("log-sum of each token",) if copies else ("log-sum of each token", "expected logit of each token")
        sums = [tape.store(name, of_token, "fp32", citation) for name in names]
        entropy = [] if copies else [tape.store("entropy of each token", of_token, "fp32", citation)]
        found = tape.new("log-probability of each token", of_token, "fp32", citation, grad=logits.grad)
        half = [tape.store("logits of chosen or rejected sequences", ("b/2", "s-1", "V"), logits.dtype, citation)]
        also = (*labels, *entropy, *sums)
        tape.record(
            Node(
                "selective_log_softmax",
                (rows,),
                (found,),
                (rows.storage, *labels, *sums),
                (NEW,),
                forward=ForwardMemory(also=also, first=tuple(labels), temporaries=tuple(half if averages else ())),
            )
        )
        return found

    def gathered_log_softmax(self, logits: Tensor, *, apart: bool) -> Tensor:
        """The log-probabilities of labels, of all sequences or first of the chosen and then of the rejected ones."""
        if not apart:
            return self._scored(logits, "b")
        tape, found = self.tape, []
        for name in ("chosen", "rejected"):
            half = Tensor(logits.storage, ("b/2", *logits.shape[1:]), logits.dtype, logits.grad)
            tape.record(Node(f"logits of {name} sequences", (logits,), (half,), (), (NEW,)))
            found.append(self._scored(half, "b/2"))
        ratios = tape.new("log-ratios", ("b/2",), logits.dtype, "torchtune 0.6.1 rlhf/loss/dpo.py", grad=logits.grad)
        tape.record(Node("log-ratios", tuple(found), (ratios,), (), (SAME, NEW)))
        return ratios

    def _scored(self, logits: Tensor, rows: str) -> Tensor:
        """Gather log-probabilities from those of all logits but the last token's.

        torchtune 0.6.1 rlhf/sequence_processing.py, get_batch_log_probs and logits_to_logprobs: a division by the
        temperature copies the slice of the logits. Backward of the gather and of each slice fills zeros of the shape
        that was read from.
        """
        tape, citation = self.tape, "torchtune 0.6.1 rlhf/sequence_processing.py, logits_to_logprobs"
        shape = (rows, "s-1", "V")
        labels = tape.store("labels of tokens with a label", shape[:2], "int64", citation)
        counted = tape.store("whether a token has a label", shape[:2], "bool", citation)
        tape.record(
            Node("labels of tokens with a label", (), (), (), (), forward=ForwardMemory(also=(labels, counted)))
        )
        sliced = Tensor(logits.storage, shape, logits.dtype, logits.grad)
        tape.record(Node("logits of tokens with a label", (logits,), (sliced,), (), (NEW,)))
        scaled = tape.new("logits over the temperature", shape, logits.dtype, citation, grad=logits.grad)
        tape.record(Node("division by the temperature", (sliced,), (scaled,), (), (NEW,)))
        each = tape.new("log-probabilities", shape, logits.dtype, citation, grad=logits.grad)
        tape.record(Node("log_softmax", (scaled,), (each,), (each.storage,), (NEW,)))
        found = tape.new("log-probability of each token", shape[:2], logits.dtype, citation, grad=logits.grad)
        tape.record(Node("gather", (each,), (found,), (labels,), (NEW,)))
        masked = tape.new("log-probability of each label", shape[:2], logits.dtype, citation, grad=logits.grad)
        tape.record(Node("product with the mask", (found,), (masked,), (counted,), (NEW,)))
        total = tape.new("log-probability of each sequence", (rows,), logits.dtype, citation, grad=logits.grad)
        tape.record(Node("sum over tokens", (masked,), (total,), (), (SAME,)))
        return total

    def tiled_cross_entropy(self, x: Tensor, weight: Shape, held: str, *, tied: bool) -> None:
        """TRL's fused loss on tiles of logits, recomputed in backward; gradients are summed in fp32, then cast.

        An index selects the tokens with a label (all but the last of each sequence), which copies them. In backward the
        casts of a tile are variables, which are freed when those of the next tile exist
        (trl 1.16 kernels/chunked_logprob.py, backward: hidden_chunk, w_chunk).

        Args:
            x: the hidden state.
            weight: shape of the LM head's weight.
            held: its dtype.
            tied: whether it is the embedding's.
        """
        tape = self.tape
        rows = Tensor(x.storage, ("b", "s-1", weight[1]), x.dtype, x.grad)
        tape.record(Node("tokens with a label", (x,), (rows,), (), (NEW,)))
        mask = tape.store("whether a token has a label", ("b", "s-1"), "bool", TRL)
        hidden = tape.new("hidden states of tokens with a label", ("T_s", weight[1]), x.dtype, TRL, grad=x.grad)
        found = tape.store("indices of these tokens", ("2", "T_s"), "int64", TRL)
        tape.record(
            Node(
                "hidden states by label",
                (rows,),
                (hidden,),
                (mask,),
                (NEW,),
                forward=ForwardMemory(also=(mask,), first=(mask,), temporaries=(found,)),
                backward=BackwardMemory(temporaries=(found,)),
            )
        )
        trains, dtype = self.trains("lm_head"), self.compute if self.autocast else x.dtype
        tile = tape.store("tile of logits", ("T_t", "V_t"), dtype, TRL)
        casts: list[int] = []
        before: list[int] = []
        for name, own, rows_of_tile, rows_before in (
            ("hidden states", hidden.dtype, "T_t", "T_p"),
            ("lm_head.weight", held, "V_w", "V_p"),
        ):
            if own != dtype:
                casts.append(tape.store(f"{name} of a tile in {dtype}", (rows_of_tile, weight[1]), dtype, TRL))
                before.append(tape.store(f"{name} of the tile before in {dtype}", (rows_before, weight[1]), dtype, TRL))
        sums = [tape.store(f"{name} of each token", ("T_s",), "fp32", TRL) for name in _SUMS]
        kept = [tape.store(f"{name} of each token", ("T_s",), "fp32", TRL) for name in ("log-sum", "entropy")]
        labels = tape.store("labels of these tokens", ("T_s",), "int64", TRL)
        wide: list[int] = []
        if hidden.dtype != "fp32":
            wide.append(tape.store("gradient of hidden states in fp32", hidden.shape, "fp32", TRL))
        parameters: tuple[int, ...] = ()
        if trains:
            if self.parameters != "fp32":
                wide.append(tape.store("gradient of lm_head.weight in fp32", weight, "fp32", TRL))
            parameters = (self.parameter_gradient("lm_head", "weight", weight, self.parameters),)
            if tied:
                tape.gradients.deferred.update(parameters)
                (tape.gradients.tied,) = parameters
        loss = tape.new("loss", (), "fp32", TRL)
        made = (labels, *kept)
        # Gradients in fp32 are allocated before the tile, the others after it, when the sums are cast.
        temporaries, cast = (*wide, tile, *before, *casts), hidden.dtype != "fp32"
        tape.record(
            Node(
                "tiled cross_entropy",
                (hidden,),
                (loss,),
                (hidden.storage, *made),
                (NEW,),
                forward=ForwardMemory(also=made, first=(labels,), temporaries=(*sums, tile, *casts)),
                backward=BackwardMemory(
                    prepares=tuple((index, 1) for index in temporaries) if cast else (),
                    temporaries=() if cast else temporaries,
                    parameters_first=cast and self.parameters == "fp32",
                ),
                parameters=parameters,
                multiplies=True,
                written=tile,
            )
        )
        tape.hold(loss)

    def mean_of_tokens(self, losses: Tensor) -> Tensor:
        """The mean of all tokens' losses; saves nothing."""
        mean = self.tape.new("loss", (), "fp32", "aten::mean")
        self.tape.record(Node("mean of tokens", (losses,), (mean,), (), (NEW,)))
        return mean


def _chunks(count: int) -> tuple[str, ...]:
    """Return the axes of `count` chunks of tokens."""
    return (*["T/n"] * (count - 1), "T'")
