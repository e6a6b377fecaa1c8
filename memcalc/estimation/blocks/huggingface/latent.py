"""Multi-head latent attention: queries, and keys with values, pass through narrow latents."""

from __future__ import annotations

from memcalc.estimation.blocks.huggingface.experts import COPIES
from memcalc.estimation.blocks.huggingface.llama import Llama
from memcalc.estimation.blocks.huggingface.sigmoid import SCORES, GroupLimited
from memcalc.estimation.blocks.structure import Structure
from memcalc.estimation.tape import Tensor

TOKENS = ("b", "s")
HEADS = (*TOKENS, "h")
QUERIES = "h·(d_n+d_r)"


class Latent(Llama):
    """DeepseekV3Attention: pairs of neighbouring features of a part of each head turn; keys share theirs."""

    latents: tuple[Tensor, ...] = ()  # of the layer's attention, whose variables they are until it returns

    @classmethod
    def lacks_kernel(cls, c: Structure) -> str:
        """PyTorch's flash has none for values that are not as wide as keys."""
        return "whose values are not as wide as its keys" if c.attention == "flash" else ""

    @property
    def turned_width(self) -> str:
        """The part of a head that turns."""
        return "d_r"

    @property
    def core_width(self) -> str:
        """Values have a width of their own."""
        return "h·d_v"

    @property
    def turned_by_head(self) -> bool:
        """Queries are joined, and keys written, in the order of their axes."""
        return True

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Through latents; keys are written into a tensor of their own."""
        ops = self.ops
        q = self.queries(x)
        plain_q, turning_q = ops.split(ops.seen(q, "q"), ((*HEADS, "d_n"), (*HEADS, "d_r")), "q parts")
        latent = ("b", "s", "r_kv+d_r")
        joint = ops.linear(x, "attention.kv_a_proj", (latent[-1], "d"), latent, bias=self.c.qkv_bias)
        compressed, turning_k = ops.split(joint, ((*TOKENS, "r_kv"), (*TOKENS, "1", "d_r")), "latents")
        compressed = self.norm(compressed, "attention.kv_a_norm", "r_kv")
        turned_q, turned_k = self.positioned(turning_q, turning_k)
        whole_q = ops.concatenate((plain_q, turned_q), (*HEADS, "d_n+d_r"), "q joined")
        both = (*HEADS, "d_n+d_v")
        kv = ops.linear(compressed, "attention.kv_b_proj", ("h·(d_n+d_v)", "r_kv"), both, bias=False)
        plain_k, v = ops.split(ops.seen(kv, "k and v"), ((*HEADS, "d_n"), (*HEADS, "d_v")), "k and v")
        for_all = ops.expanded(turned_k, "turned k for each head", (*HEADS, "d_r"))
        k = ops.written((plain_k, for_all), (*HEADS, "d_n+d_r"), "k written")
        self.latents = (q, turned_q, joint, compressed, turned_k)
        return whole_q, k, v

    def queries(self, x: Tensor) -> Tensor:
        """Of a latent of their own, where there is one."""
        c, ops, out = self.c, self.ops, (*HEADS, "d_n+d_r")
        if not c.query_latent:
            return ops.linear(x, "attention.q_proj", (QUERIES, "d"), out, bias=False)
        latent = ops.linear(x, "attention.q_a_proj", ("r_q", "d"), (*TOKENS, "r_q"), bias=c.qkv_bias)
        latent = self.norm(latent, "attention.q_a_norm", "r_q")
        return ops.linear(latent, "attention.q_b_proj", (QUERIES, "r_q"), out, bias=False)

    def positioned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """apply_rotary_pos_emb_interleave: products of halves, which are joined."""
        halves = {"q": self.halves(q, "q"), "k": self.halves(k, "k")}
        return self.turned_pairs(q, "q", *halves["q"]), self.turned_pairs(k, "k", *halves["k"])

    def halves(self, x: Tensor, name: str) -> tuple[Tensor, ...]:
        """Every second feature, and those between."""
        half = (*x.shape[:-1], "d_r/2")
        return self.ops.slices(x, (half, half), f"{name} halves")

    def scaled_dot_product(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Memory-efficient: flash has no kernel for values that are not as wide as keys."""
        return self.ops.efficient_attention(q, k, v, "h", "d_n+d_r", "s", masked=self.c.masked, out=v.shape)

    def attended(self, x: Tensor) -> Tensor:
        """The latents go with their names."""
        self.tape.still_named(*self.latents)
        return x


class DeepseekV3(Latent, GroupLimited):
    """DeepseekV3DecoderLayer."""

    groups = "8"
    best_groups = "4"


class DeepseekV2(Latent, GroupLimited):
    """DeepseekV2DecoderLayer: pairs turn as complex numbers; the best of all experts (greedy)."""

    tables = ("turns of pairs",)
    wide_tables = True

    def positioned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """apply_rotary_emb: products of complex64, which a pair of fp32 is seen as."""
        ops = self.ops
        wide = [(x, name, ops.cast(x, "fp32", f"{name} in fp32")) for x, name in ((q, "q"), (k, "k"))]
        found = [ops.cast(ops.mul_table(each, f"{name} * turns", "fp32"), x.dtype) for x, name, each in wide]
        self.tape.still_named(*(each for _, _, each in wide))
        return found[0], found[1]

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """DeepseekV2TopkRouter, in fp32."""
        ops = self.ops
        logits = ops.wide_linear(x, "mlp.router", ("E", "d"), SCORES)
        scores = ops.softmax(logits, "router scores", "fp32")
        best, chosen = ops.top_k(scores, COPIES, "router weights")
        weights = ops.scale(best, "scaled router weights")
        self.tape.still_named(scores, best)
        return logits, weights, chosen
