"""Nemotron: LayerNorm with a weight around 1, relu squared, and RoPE on a part of each head; and Nemotron-H.

A layer of Nemotron-H has a single module: Mamba-2, attention without positions, an MLP, or experts.
"""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import Llama
from memcalc.architectures.huggingface.modules.experts import grouped_experts, relu_squared
from memcalc.architectures.huggingface.modules.mamba2 import Mamba2
from memcalc.architectures.huggingface.modules.norms import fp32_weight_rms_norm
from memcalc.architectures.huggingface.sigmoid_router import GroupLimitedRouter
from memcalc.programs.tape import Tensor
from memcalc.spec.model import ATTENTION, EXPERTS, MAMBA, MLP


class Nemotron(Llama):
    """NemotronDecoderLayer."""

    always_joins = True

    def norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """NemotronLayerNorm1P: autocast is off inside, and its input is cast to autocast's dtype."""
        ops = self.ops
        given, before = x, ops.autocast
        if before:
            x = ops.cast(x, ops.compute, f"{module} input in {ops.compute}")
        ops.autocast = False
        y = ops.layer_norm(x, module, width)
        ops.autocast = before
        ops.also_save(y, f"{module}.weight + 1", (width,), ops.compute if before else ops.parameters)
        self.tape.still_referenced(given)
        return y


class NemotronH(Mamba2, GroupLimitedRouter):
    """NemotronHBlock: the residual sum of one module after its norm."""

    rotates = False

    def layer(self) -> Tensor:
        """The layer's module, after its norm."""
        modules = {MAMBA: self.mamba, ATTENTION: self.attention, MLP: self.mlp, EXPERTS: self.routed}
        return self.residual(self.entry(), modules[self.c.mixer], "layer output", before="input_norm")

    def norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """NemotronHRMSNorm."""
        return fp32_weight_rms_norm(self.ops, x, module, width)

    def logits(self, x: Tensor) -> Tensor:
        """self.lm_head(...).float()."""
        return self.ops.cast(x, "fp32", "logits in fp32")

    def positioned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, without RoPE."""
        return q, k

    @property
    def rotates_by_slices(self) -> bool:
        """Whether gradients of queries and keys are sums of filled slices: without RoPE they are not."""
        return False

    def routed(self, x: Tensor) -> Tensor:
        """NemotronHMoE: routed experts of tokens or of their latents, and a shared expert."""
        c, ops = self.c, self.ops
        logits, weights, chosen = self.route(ops.flattened(x, "tokens of the router"))
        width = "d_l" if c.latent_experts else "d"
        tokens = self.latent(x, "mlp.fc1_latent_proj", ("d_l", "d")) if c.latent_experts else x
        total = grouped_experts(ops, tokens, weights, chosen, relu_squared, up="F_e", width=width)
        if c.latent_experts:
            total = self.latent(total, "mlp.fc2_latent_proj", ("d", "d_l"))
        y = ops.add(total, self.dense(x, "mlp.shared_experts.", "F_s"), "experts and shared expert")
        self.tape.still_referenced(logits, weights, chosen, total)
        return y

    def latent(self, x: Tensor, module: str, weight: tuple[str, str]) -> Tensor:
        """A projection to the latent of experts, or back."""
        return self.ops.linear(x, module, weight, ("b", "s", weight[0]), bias=self.c.mlp_bias)
