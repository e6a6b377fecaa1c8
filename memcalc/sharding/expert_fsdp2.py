"""FSDP2 with expert parallelism, as torchtitan applies it: routed experts are a unit of their own inside each layer.

Experts are sharded over fewer ranks than other parameters. Prefetching is explicit: a layer gathers the next layer and
its experts when it begins, in backward the one before. The experts are copied out when their own forward or backward
begins, and their gradients are reduced when it ends; a recomputation leaves them gathered for the backward.
Sources: torchtitan 0.2.2 torchtitan/models/llama4/infra/parallelize.py, apply_fsdp; torch 2.13
distributed/fsdp/_fully_shard/_fsdp_state.py, _pre_forward and _pre_backward, and _fsdp_param_group.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memcalc.layout.local_parameters import LocalParameter
from memcalc.sharding.engine import EMBEDDING, ROOT, TAIL, Gradient
from memcalc.sharding.fsdp2 import FSDP2, expert_unit
from memcalc.states.state_options import StateOptions
from memcalc.stream.requests import Requests

EXPERTS = "mlp.experts"


class ExpertFSDP2(FSDP2):
    """One rank of FSDP2 with units of experts.

    Args:
        requests: the list of requests to record to.
        units: the parameters of each unit, in registration order; those of experts belong to their layer here.
        choice: state options of the run.
    """

    hooks_modules = True
    reduces_modules = True

    def __init__(
        self, requests: Requests, units: Mapping[int, Sequence[LocalParameter]], options: StateOptions
    ) -> None:
        apart: dict[int, Sequence[LocalParameter]] = {}
        for unit, parameters in units.items():
            apart[unit] = tuple(each for each in parameters if not each.routed)
            if routed := tuple(each for each in parameters if each.routed):
                apart[expert_unit(unit)] = routed
        super().__init__(requests, apart, options)
        layers = [*self.before, TAIL]
        self.after = dict(zip((EMBEDDING, *self.before), layers, strict=True))  # layer -> the unit that runs after it
        self.in_backward = False
        self.inside: tuple[int, bool] | None = None  # the experts that run, and whether they are recomputed
        self.produced: list[Gradient] = []  # gradients of experts that wait for the end of their backward
        self.expert_gradients: list[int] = []  # sharded gradients of experts that wait for the end of their layer

    def before_forward(self, unit: int) -> None:
        """Pre-forward, then prefetch the unit that runs next (_fsdp_state.py, _pre_forward)."""
        self.in_backward = False
        if unit in self.sizes and unit not in self.parameters:
            if unit not in self.gathering:
                self._all_gather(unit)
            output = self._copy_out(unit)
            self.requests.drop(self.copied)
            self.copied = [output]
        following = self.after.get(unit)
        if following is not None:
            self._prefetch(following, with_experts=unit != EMBEDDING)

    def before_backward(self, unit: int) -> None:
        """Pre-backward, then prefetch the unit that ran before, with its experts if it is not the last layer."""
        self.in_backward = True
        if unit not in self.parameters and unit in self.sizes:
            if unit not in self.gathering:
                self._all_gather(unit)
            self.requests.drop((self._copy_out(unit),))
        before = self._before(unit)
        if before is not None and not self._is_expert(unit):
            self._prefetch(before, with_experts=unit not in (TAIL, ROOT))

    def _prefetch(self, unit: int, *, with_experts: bool) -> None:
        for each in (unit, expert_unit(unit)) if with_experts and unit >= 0 else (unit,):
            if each in self.sizes and each not in self.parameters and each not in self.gathering:
                self._all_gather(each)

    @staticmethod
    def _is_expert(unit: int) -> bool:
        return unit not in (ROOT, EMBEDDING, TAIL) and unit < 0

    def module_of(self, unit: int, name: str) -> str:  # noqa: ARG002
        """Return the module of the routed experts for their linear layers; no other module is hooked."""
        return EXPERTS if name.startswith(f"{EXPERTS}.") else ""

    def before_module(self, unit: int, module: str, *, again: bool) -> None:  # noqa: ARG002
        """Run the hooks of a layer's experts before their forward, their backward, or a recomputation."""
        experts = expert_unit(unit)
        self.inside = experts, again
        if again:
            if experts in self.sizes and experts not in self.parameters:
                if experts not in self.gathering:
                    self._all_gather(experts)
                self.copied = [self._copy_out(experts)]
        elif self.in_backward:
            self.before_backward(experts)
        else:
            self.before_forward(experts)

    def module_gradients(self, gradients: Sequence[Gradient]) -> None:
        """Take over the gradients of the experts, where their backward ends."""
        self.produced += gradients

    def after_module(self) -> None:
        """Run the hooks after the experts' forward, backward, or recomputation."""
        if self.inside is None:
            return
        (experts, again), self.inside = self.inside, None
        if again:
            self.requests.drop(self.copied)  # the experts are the root of this forward (_fsdp_state.py, _post_forward)
            self.copied = []
        elif self.in_backward:
            gradients, self.produced = self.produced, []
            self.expert_gradients += super().after_backward(experts, gradients)
        else:
            self.after_forward(experts)

    def after_backward(self, unit: int, gradients: Sequence[Gradient]) -> list[int]:
        """Post-backward; also return the sharded gradients of the layer's experts."""
        kept, self.expert_gradients = self.expert_gradients, []
        return [*kept, *super().after_backward(unit, gradients)]
