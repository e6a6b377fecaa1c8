"""Multi-head latent attention: low-rank latents for queries, and for keys with values."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import Llama
from memcalc.architectures.huggingface.modules.experts import COPIES
from memcalc.architectures.huggingface.sigmoid_router import SCORES, GroupLimitedRouter
from memcalc.architectures.kv_cache import cached, cached_attention
from memcalc.architectures.structure import BlockStructure
from memcalc.programs.tape import Tensor

TOKENS = ("b", "s")
HEADS = (*TOKENS, "h")
QUERIES = "h·(d_n+d_r)"


class DeepseekAttention(Llama):
    """DeepseekV3Attention: RoPE on pairs of adjacent features of a part of each head; keys share theirs."""

    caches_latents = True
    latents: tuple[Tensor, ...] = ()  # variables of the layer's attention, referenced until it returns

    @classmethod
    def lacks_kernel(cls, c: BlockStructure) -> str:
        """Return why flash attention has no kernel: values and keys differ in head_dim."""
        return "because its values and keys differ in size" if c.attention.kernel == "flash" else ""

    @property
    def rotated_size(self) -> str:
        """Axis of the rotary features of a head."""
        return "d_r"

    @property
    def core_width(self) -> str:
        """Axis of attention's output: all heads of values, which have a separate head_dim."""
        return "h·d_v"

    @property
    def rotated_by_head(self) -> bool:
        """Whether rotated queries and keys are contiguous by head: both are written in that order."""
        return True

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project through latents; keys are written into a new tensor."""
        ops = self.ops
        q = self.queries(x)
        plain_q, turning_q = ops.split(ops.restrided_view(q, "q"), ((*HEADS, "d_n"), (*HEADS, "d_r")), "q parts")
        latent = ("b", "s", "r_kv+d_r")
        joint = ops.linear(x, "attention.kv_a_proj", (latent[-1], "d"), latent, bias=self.c.projections.bias)
        compressed, turning_k = ops.split(joint, ((*TOKENS, "r_kv"), (*TOKENS, "1", "d_r")), "latents")
        compressed = self.norm(compressed, "attention.kv_a_norm", "r_kv")
        turned_q, turned_k = self.positioned(turning_q, turning_k)
        self.latents = (q, turned_q, joint, compressed, turned_k)
        if self.c.cache is not None:  # of the latents
            compressed, turned_k = cached(ops, self.c.cache, compressed, turned_k)
        keys = compressed.shape[1]
        whole_q = ops.concatenate((plain_q, turned_q), (*HEADS, "d_n+d_r"), "q joined")
        heads = ("b", keys, "h")
        both = (*heads, "d_n+d_v")
        kv = ops.linear(compressed, "attention.kv_b_proj", ("h·(d_n+d_v)", "r_kv"), both, bias=False)
        plain_k, v = ops.split(ops.restrided_view(kv, "k and v"), ((*heads, "d_n"), (*heads, "d_v")), "k and v")
        for_all = ops.expanded(turned_k, "turned k for each head", (*heads, "d_r"))
        k = ops.written((plain_k, for_all), (*heads, "d_n+d_r"), "k written")
        return whole_q, k, v

    def queries(self, x: Tensor) -> Tensor:
        """Project queries, through a latent if the model has one for queries."""
        c, ops, out = self.c, self.ops, (*HEADS, "d_n+d_r")
        if not c.projections.query_latent:
            return ops.linear(x, "attention.q_proj", (QUERIES, "d"), out, bias=False)
        latent = ops.linear(x, "attention.q_a_proj", ("r_q", "d"), (*TOKENS, "r_q"), bias=c.projections.bias)
        latent = self.norm(latent, "attention.q_a_norm", "r_q")
        return ops.linear(latent, "attention.q_b_proj", (QUERIES, "r_q"), out, bias=False)

    def positioned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """apply_rotary_pos_emb_interleave: products of halves, concatenated."""
        halves = {"q": self.halves(q, "q"), "k": self.halves(k, "k")}
        return self.rotated_pairs(q, "q", *halves["q"]), self.rotated_pairs(k, "k", *halves["k"])

    def halves(self, x: Tensor, name: str) -> tuple[Tensor, ...]:
        """The even features and the odd features."""
        half = (*x.shape[:-1], "d_r/2")
        return self.ops.slices(x, (half, half), f"{name} halves")

    def scaled_dot_product(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Memory-efficient attention: flash has no kernel for values and keys of different head_dim."""
        if self.c.cache is not None:
            return cached_attention(self.ops, self.c, q, k, v, ("h", "h", "d_n+d_r"), (*HEADS, "d_v"))
        return self.ops.efficient_attention(q, k, v, "h", "d_n+d_r", "s", masked=self.c.layer.masked, out=v.shape)

    def attended(self, x: Tensor) -> Tensor:
        """End of attention: its variables release the latents."""
        self.tape.still_referenced(*self.latents)
        return x


class DeepseekV3(DeepseekAttention, GroupLimitedRouter):
    """DeepseekV3DecoderLayer."""

    groups = "8"
    best_groups = "4"


class DeepseekV2(DeepseekAttention, GroupLimitedRouter):
    """DeepseekV2DecoderLayer: RoPE on complex pairs; top-k of all experts (greedy)."""

    tables = ("turns of pairs",)
    wide_tables = True

    def positioned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """apply_rotary_emb: complex64 products; a pair of fp32 numbers is viewed as complex."""
        ops = self.ops
        wide = [(x, name, ops.cast(x, "fp32", f"{name} in fp32")) for x, name in ((q, "q"), (k, "k"))]
        found = [ops.cast(ops.mul_table(each, f"{name} * turns", "fp32"), x.dtype) for x, name, each in wide]
        self.tape.still_referenced(*(each for _, _, each in wide))
        return found[0], found[1]

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """DeepseekV2TopkRouter, in fp32."""
        ops = self.ops
        logits = ops.fp32_linear(x, "mlp.router", ("E", "d"), SCORES)
        scores = ops.softmax(logits, "router scores", "fp32")
        best, chosen = ops.top_k(scores, COPIES, "router weights")
        weights = ops.scale(best, "scaled router weights")
        self.tape.still_referenced(scores, best)
        return logits, weights, chosen
