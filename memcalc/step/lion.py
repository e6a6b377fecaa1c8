"""Lion (Chen et al., arXiv 2302.06675): the sign of a momentum, which is its only state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


class Lion(torch.optim.Optimizer):
    """Lion over all parameters at once (foreach) or one at a time.

    Args:
        params: the parameters.
        lr: learning rate.
        betas: coefficients of the update and of the momentum.
        weight_decay: decoupled, as in AdamW.
        foreach: update all parameters in one call, at the cost of temporaries as large as the momentum.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        foreach: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "foreach": foreach})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters; a closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            for parameter in held:
                if not self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            for batch in [held] if group["foreach"] else [[p] for p in held]:
                self._update(batch, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        moments = [self.state[p]["exp_avg"] for p in parameters]
        first, second = group["betas"]
        update = torch._foreach_mul(moments, first)  # noqa: SLF001 -- the out-of-place calls have no public name
        torch._foreach_add_(update, gradients, alpha=1 - first)
        torch._foreach_sign_(update)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, update, alpha=-group["lr"])
        torch._foreach_mul_(moments, second)
        torch._foreach_add_(moments, gradients, alpha=1 - second)
