"""Nemotron: LayerNorm with a weight around 1, relu squared, and RoPE on a part of each head; and Nemotron-H.

A layer of Nemotron-H has a single module: Mamba-2, attention without positions, an MLP, or experts.
"""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import Llama
from memcalc.architectures.huggingface.modules.experts import grouped_experts, relu_squared
from memcalc.architectures.huggingface.modules.mamba2 import Mamba2
from memcalc.architectures.huggingface.modules.norms import fp32_weight_rms_norm
from memcalc.architectures.huggingface.sigmoid_router import GroupLimitedRouter
from memcalc.ledger.component import Component
from memcalc.programs.tape import Node, Shape, Tensor
from memcalc.spec.model import ATTENTION, EXPERTS, MAMBA, MLP


class Nemotron(Llama):
    """NemotronDecoderLayer."""

    always_joins = True
    turned: tuple[Tensor, ...] = ()  # q_embed and k_embed

    def joined(self, turned: Tensor, passed: Tensor | None, x: Tensor, name: str) -> Tensor:
        """Both parts in one tensor; variables reference the first parts of q and k until both are joined."""
        self.turned += (turned,)
        y = super().joined(turned, passed, x, name)
        self.tape.still_referenced(*self.turned)
        return y

    def norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """NemotronLayerNorm1P: by 1 plus the weight; under autocast, with all arguments cast before."""
        ops, tape, shape = self.ops, self.tape, (width,)
        shifted = self.copied(f"{module}.weight + 1", shape, ops.parameters)
        if not ops.autocast:
            y = ops.layer_norm(x, module, width)  # its gradient of the sum is that of the weight
            if tape.nodes[-1].saved:
                tape.nodes[-1].saved += (shifted.storage,)
            tape.still_referenced(x, shifted)
            return y
        given, dtype = x, ops.compute
        x = ops.cast(x, dtype, f"{module} input in {dtype}")
        casts = [self.copied(f"{module}.{name} in {dtype}", shape, dtype, module, name) for name in ("weight", "bias")]
        tape.still_referenced(shifted)
        ops.autocast = False
        y = ops.layer_norm(x, module, width, (), computed=tuple(casts))
        ops.autocast = True
        tape.still_referenced(given, x)
        return y

    def copied(self, name: str, shape: Shape, dtype: str, module: str = "", parameter: str = "") -> Tensor:
        """A tensor computed from a parameter; its backward produces the parameter's gradient, if named."""
        tape = self.tape
        # A copy of a parameter is no activation: a temporary, as in the trace.
        component = Component.TEMPORARIES if parameter == "bias" else None
        y = Tensor(tape.store(name, shape, dtype, self.citation, component=component), shape, dtype)
        y.grad = bool(parameter) and self.ops.trains(module)
        gradients = (self.ops.parameter_gradient(module, parameter, shape, self.ops.parameters),) if y.grad else ()
        tape.record(Node(name, (), (y,), (), (), parameters=gradients))
        return y


class NemotronH(Mamba2, GroupLimitedRouter):
    """NemotronHBlock: the residual sum of one module after its norm."""

    rotates = False

    def layer(self) -> Tensor:
        """The layer's module, after its norm."""
        modules = {MAMBA: self.mamba, ATTENTION: self.attention, MLP: self.mlp, EXPERTS: self.routed}
        return self.residual(self.entry(), modules[self.c.layer.mixer], "layer output", self.attention_norms)

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
        width = "d_l" if c.experts.latent else "d"
        tokens = self.latent(x, "mlp.fc1_latent_proj", ("d_l", "d")) if c.experts.latent else x
        total = grouped_experts(ops, tokens, weights, chosen, relu_squared, up="F_e", width=width)
        if c.experts.latent:
            total = self.latent(total, "mlp.fc2_latent_proj", ("d", "d_l"))
        y = ops.add(total, self.dense(x, "mlp.shared_experts.", "F_s"), "experts and shared expert")
        self.tape.still_referenced(logits, weights, chosen, total)
        return y

    def latent(self, x: Tensor, module: str, weight: tuple[str, str]) -> Tensor:
        """A projection to the latent of experts, or back."""
        return self.ops.linear(x, module, weight, ("b", "s", weight[0]), bias=self.c.mlp.bias)
