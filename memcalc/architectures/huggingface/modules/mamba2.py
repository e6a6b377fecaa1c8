"""The Mamba-2 mixer of transformers' families, without the packages mamba-ssm and causal-conv1d."""

from __future__ import annotations

from memcalc.architectures.huggingface.family import Family
from memcalc.programs.tape import Shape, Tensor

TOKENS: Shape = ("b", "s")
INNER: Shape = (*TOKENS, "d_m")
CHUNKS: Shape = ("b", "s_Q", "Q", "h_m")  # of the sequence, padded to whole chunks
DECAYS: Shape = ("b", "h_m", "s_Q", "Q")
STATE: Shape = ("d_hm", "n_m")


class Mamba2(Family):
    """NemotronHMamba2Mixer: a convolution, a scan over chunks of tokens in fp32, and a gated norm."""

    def mamba(self, x: Tensor) -> Tensor:
        """NemotronHMamba2Mixer.forward."""
        c, ops = self.c, self.ops
        width, parts = (*TOKENS, "d_in"), (INNER, (*TOKENS, "d_conv"), (*TOKENS, "h_m"))
        projected = ops.linear(x, "mamba.in_proj", ("d_in", "d"), width, bias=c.mixers.mamba_bias)
        rates = self.decay_rates()
        gate, mixed, steps = ops.split(projected, parts, "gate, channels and time steps")
        convolved = ops.depthwise_convolution(
            mixed, "mamba.conv1d", "d_conv", mixed.shape, bias=c.mixers.conv_bias, views_weight=True
        )
        mixed = ops.pointwise(convolved, "silu of the convolution")
        shapes = ((*TOKENS, "h_m", "d_hm"), (*TOKENS, "g_m", "n_m"), (*TOKENS, "g_m", "n_m"))
        values, inputs, outputs = ops.split(mixed, shapes, "values, state inputs and state outputs")
        scanned = self.scan(values, inputs, outputs, self.time_steps(steps), rates)
        normed = self.gated_group_norm(scanned, gate, x.dtype)
        y = ops.linear(normed, "mamba.out_proj", ("d", "d_m"), (*TOKENS, "d"), bias=c.mixers.mamba_bias)
        self.tape.still_referenced(projected, mixed, rates, *self.named)
        return y

    named: tuple[Tensor, ...] = ()  # variables of the mixer's forward that are set inside other methods

    def decay_rates(self) -> Tensor:
        """A = -exp(A_log.float()), one number per head."""
        ops = self.ops
        return ops.scale(ops.exp_of_parameter("mamba.A_log", "h_m", "exp of A_log"), "decay rates")

    def time_steps(self, x: Tensor) -> Tensor:
        """clamp(softplus(dt + dt_bias)); softplus is on autocast's fp32 list."""
        ops = self.ops
        shifted = ops.plus_bias(x, "mamba.dt", "h_m", x.dtype)
        wide = ops.cast(shifted, "fp32") if ops.autocast else shifted
        rounded = ops.pointwise(wide, "softplus")
        self.tape.still_referenced(shifted)
        return ops.clamped(rounded, "time steps")

    def scan(self, values: Tensor, inputs: Tensor, outputs: Tensor, steps: Tensor, rates: Tensor) -> Tensor:
        """mamba2_chunk_scan in fp32: attention within chunks, and a state handed from chunk to chunk.

        Only factors with an axis of one entry, a batch or a chunk of one, are views that matmuls read without a copy.
        """
        c, ops, tape = self.c, self.ops, self.tape
        several = not c.mixers.single_chunk
        any_several = c.batched or several
        values = ops.cast(values, "fp32", "values in fp32")
        by_head = [self.for_each_head(x, name) for x, name in ((inputs, "state inputs"), (outputs, "state outputs"))]
        padded = ops.padded(values, (*CHUNKS, "d_hm"), "values, padded")
        skipped = ops.times_parameter(padded, "mamba.D", "h_m", "skip connection")
        stepped = ops.mul(values, ops.cast(steps, "fp32", "time steps of values"), "values·steps", reduces=True)
        decay = ops.times_row(ops.cast(steps, "fp32", "time steps of decays"), rates, "decay of tokens")
        given = (stepped, decay, *by_head)
        values = self.by_chunk(stepped, "d_hm", "values·steps")
        decay = ops.padded(decay, CHUNKS, "decay of tokens, padded")
        inputs, outputs = (
            self.by_chunk(x, "n_m", name) for x, name in zip(by_head, ("state inputs", "state outputs"), strict=True)
        )
        tape.still_referenced(*given)
        total = ops.cumulative(decay, "decay so far", DECAYS)
        pairwise = ops.pointwise(
            ops.segment_sums(decay, (*DECAYS, "Q"), "decay between tokens"), "decay factors", saves="output"
        )
        scores = ops.contracted(
            outputs,
            inputs,
            "outputs·inputs",
            ("b", "s_Q", "h_m", "Q", "Q"),
            (any_several, any_several),
            copies_gradient=False,
        )
        weights = ops.mul(scores, pairwise, "weights within chunks")
        within = ops.contracted(
            weights,
            values,
            "output within chunks",
            (*CHUNKS, "d_hm"),
            (False, several),
            copies_gradient=any_several,
        )
        last = ops.sliced(total, DECAYS[:-1], "decay of chunks")
        left = ops.pointwise(ops.less_than_last(total, last, "decay left"), "factors of decay left", saves="output")
        written = ops.mul(inputs, left, "inputs that are left", reduces=True)
        states = ops.contracted(
            values,
            written,
            "states of chunks",
            ("b", "s_Q", "h_m", *STATE),
            (several, any_several),
            copies_gradient=several,
            left_first=True,
        )
        before = ops.table("state before the first chunk", ("b", "h_m", *STATE), states.dtype)
        states = ops.concatenate((before, states), ("b", "s_Q+1", "h_m", *STATE), "states of chunks in one")
        carried = self.decay_between_chunks(total)
        summed = ops.contracted(
            carried, states, "states so far", states.shape, (False, c.batched), copies_gradient=c.batched
        )
        tape.still_referenced(states)
        starts = ops.sliced(summed, ("b", "s_Q", "h_m", *STATE), "states at the start")
        factors = ops.pointwise(total, "factors of states", saves="output")
        read = ops.contracted(
            outputs,
            starts,
            "output of states",
            (*CHUNKS, "d_hm"),
            (any_several, several),
            copies_gradient=any_several,
        )
        faded = ops.mul(read, factors, "decayed output of states", reduces=True)
        both = ops.copy(ops.add(within, faded, "output of chunks"), "output of chunks in order")
        y = ops.add(both, skipped, "output and skip connection")
        tape.still_referenced(steps, values, decay, inputs, outputs, skipped, total, pairwise, scores, weights, within)
        tape.still_referenced(left, written, before, carried, summed, factors, read, faded)
        return ops.sliced(y, (*TOKENS, "h_m", "d_hm"), "output of tokens") if c.mixers.pads_chunks else y

    def by_chunk(self, x: Tensor, width: str, name: str) -> Tensor:
        """reshape_into_chunks: padded; with several chunks, reshape copies the gradient."""
        padded = self.ops.padded(x, (*CHUNKS, width), f"{name}, padded")
        return padded if self.c.mixers.single_chunk else self.ops.restrided_view(padded, name)

    def for_each_head(self, x: Tensor, name: str) -> Tensor:
        """x.float().repeat_interleave: one copy for each head of a group."""
        ops = self.ops
        wide = ops.cast(x, "fp32", f"{name} in fp32")
        return ops.copy(wide, f"{name} for each head", (*TOKENS, "h_m", "n_m"))

    def decay_between_chunks(self, total: Tensor) -> Tensor:
        """exp(segment_sum(pad(A_cumsum[..., -1]))): factors between the states of all chunks."""
        ops, chunks = self.ops, ("b", "h_m", "s_Q+1")
        ends = ops.padded(ops.sliced(total, DECAYS[:-1], "decay of each chunk"), chunks, "decay of chunks, padded")
        sums = ops.segment_sums(ends, (*chunks, "s_Q+1"), "decay between chunks")
        return ops.pointwise(sums, "factors between chunks", saves="output")

    def gated_group_norm(self, x: Tensor, gate: Tensor, dtype: str) -> Tensor:
        """NemotronHRMSNormGated: of x * silu(gate), in groups; its weight multiplies it in fp32."""
        ops = self.ops
        opened = ops.pointwise(ops.cast(gate, "fp32", "gate in fp32"), "silu of the gate")
        x = ops.mul(ops.viewed(x, INNER, "output of all heads"), opened, "gated output")
        grouped = ops.viewed(x, (*TOKENS, "g_m", "d_m/g_m"), "gated output by group")
        variance, normed = ops.normed_with_variance(grouped, "mamba.norm", None)
        y = ops.times_weight(ops.viewed(normed, INNER, "normed output of all heads"), "mamba.norm", "d_m")
        self.tape.still_referenced(variance)
        self.named = (y,)
        return ops.cast(y, dtype, "normed output")
