"""The MLP of the reference decoder, dense and as a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from memcalc.spec.model import Mlp as MlpKind
from memcalc.spec.model import ModelSpec, MoeSpec

ACTIVATIONS: dict[MlpKind, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "swiglu": functional.silu,
    "geglu": functional.gelu,
}


def activate(mlp_type: MlpKind, up: Tensor, gate: Tensor | None) -> Tensor:
    """Return gelu(up), relu(up), relu(up)², silu(gate) * up or gelu(gate) * up."""
    activation = ACTIVATIONS[mlp_type]
    return activation(up) if gate is None else activation(gate) * up


class Mlp(nn.Module):
    """Up (and gate) projection, activation, down projection."""

    def __init__(self, model: ModelSpec, width: int) -> None:
        super().__init__()
        self.mlp_type = model.mlp
        self.gate_proj = nn.Linear(model.hidden_size, width, bias=model.mlp_bias) if model.gated_mlp else None
        self.up_proj = nn.Linear(model.hidden_size, width, bias=model.mlp_bias)
        self.down_proj = nn.Linear(width, model.hidden_size, bias=model.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output: (b, s, d) to (b, s, d)."""
        gate = None if self.gate_proj is None else self.gate_proj(x)
        return self.down_proj(activate(self.mlp_type, self.up_proj(x), gate))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """All routed experts as batched weight matrices: (E, rows, d) to (E, rows, d)."""

    def __init__(self, model: ModelSpec, moe: MoeSpec) -> None:
        super().__init__()
        self.mlp_type = model.mlp
        width = moe.expert_intermediate_size
        up = (moe.num_experts, model.hidden_size, width)
        self.gate_proj = BatchedLinear(*up, bias=model.experts_have_bias) if model.gated_mlp else None
        self.up_proj = BatchedLinear(*up, bias=model.experts_have_bias)
        self.down_proj = BatchedLinear(moe.num_experts, width, model.hidden_size, bias=model.experts_have_bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the output of every expert on its own rows."""
        gate = None if self.gate_proj is None else self.gate_proj(tokens)
        return self.down_proj(activate(self.mlp_type, self.up_proj(tokens), gate))  # type: ignore[no-any-return]


class BatchedLinear(nn.Module):
    """One linear layer per expert, initialized like nn.Linear: (E, rows, into) to (E, rows, out)."""

    def __init__(self, experts: int, into: int, out: int, *, bias: bool) -> None:
        super().__init__()
        bound = into**-0.5
        self.weight = nn.Parameter(torch.empty(experts, into, out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(experts, 1, out).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return each expert's matmul."""
        return x @ self.weight if self.bias is None else torch.baddbmm(self.bias, x, self.weight)


class MixtureOfExperts(nn.Module):
    """Top-k routing in which every expert gets an equal fraction of the token copies, sorted by expert.

    Sizes are those of balanced routing, and no value is copied to the CPU, so the step also runs on devices that
    compute
    no values. It models memory only: with unbalanced routing, copies at a boundary go to the neighboring expert.
    """

    def __init__(self, model: ModelSpec, moe: MoeSpec) -> None:
        super().__init__()
        self.moe = moe
        self.router = nn.Linear(model.hidden_size, moe.num_experts, bias=moe.router_bias)
        self.experts = Experts(model, moe)
        shared = moe.shared_expert_intermediate_size
        self.shared_expert = Mlp(model, shared) if shared else None
        gated = bool(shared) and moe.shared_expert_gate
        self.shared_expert_gate = nn.Linear(model.hidden_size, 1, bias=False) if gated else None
        self.correction: Tensor | None
        correction = torch.zeros(moe.num_experts, dtype=torch.float32) if moe.router_correction_bias else None
        self.register_buffer("correction", correction)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output: (b, s, d) to (b, s, d)."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.route(tokens)
        copies = chosen.numel()
        order = chosen.flatten().argsort()
        source = order // self.moe.num_experts_per_token
        rows = -(-copies // self.moe.num_experts)  # per expert, rounded up
        permuted = functional.pad(tokens[source], (0, 0, 0, rows * self.moe.num_experts - copies))
        done = self.experts(permuted.view(self.moe.num_experts, rows, -1)).flatten(0, 1)[:copies]
        weighted = done * weights.flatten()[order, None].to(done.dtype)
        y = torch.zeros_like(tokens, dtype=done.dtype).index_add(0, source, weighted)
        return self.with_shared_expert(tokens, y).view_as(x)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of each token's top-k experts, and their indices: (tokens, k) each."""
        probabilities = functional.softmax(self.router(tokens).float(), dim=-1)
        ranked = probabilities if self.correction is None else probabilities + self.correction
        chosen = ranked.topk(self.moe.num_experts_per_token, dim=-1).indices
        weights = probabilities.gather(-1, chosen)
        return weights / weights.sum(dim=-1, keepdim=True), chosen

    def with_shared_expert(self, tokens: Tensor, y: Tensor) -> Tensor:
        """Return the experts' sum plus the output of the shared expert, if there is one."""
        if self.shared_expert is None:
            return y
        common = self.shared_expert(tokens)
        if self.shared_expert_gate is not None:
            common = torch.sigmoid(self.shared_expert_gate(tokens)) * common
        return y + common  # type: ignore[no-any-return]
