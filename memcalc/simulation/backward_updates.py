"""An optimizer that steps within backward: each parameter is updated in a hook, once its gradient is complete.

torchtune 0.6 training/memory.py, register_optim_in_bwd_hooks: one optimizer for each parameter; its step and
zero_grad run in the parameter's post-accumulate-grad hook.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.sharding.engine import Engine, Gradient, OptimizerGroups
from memcalc.simulation.optimizer_update import OptimizerUpdate
from memcalc.states.state_options import StateOptions
from memcalc.stream.requests import Requests


class UpdatesInBackward(Engine):
    """One GPU; each gradient is freed as soon as it has updated its parameter.

    Args:
        requests: where they are recorded.
        ordered: all parameters, in registration order.
    """

    keeps_gradients = False
    hooks_gradients = frees_gradients = True
    repeats = False  # the first step allocates the optimizer's states

    def __init__(self, requests: Requests, ordered: Sequence[LocalParameter]) -> None:
        super().__init__(requests)
        self.ordered = ordered
        self.choices: dict[LocalParameter, StateOptions] = {}  # one optimizer for each trained parameter
        # After the first step, one optimizer for all identical parameters.
        self.updates: dict[LocalParameter, OptimizerUpdate] = {}
        self.is_first_step = True

    def updated(self, groups: OptimizerGroups) -> OptimizerGroups:
        """Return no parameters for the step after backward; each gets an optimizer for itself."""
        self.choices = {held: choice for parameters, choice in groups for held in parameters}
        return ()

    def wrap(self, weights: Sequence[int]) -> None:
        """Allocate the states that constructors of optimizers create."""
        del weights
        for held in self.ordered:
            if held in self.choices:
                self._update_of(held).build()

    def gradient_ready(self, gradient: Gradient) -> None:
        """Update a parameter, then free its gradient."""
        held = gradient.parameter
        assert held is not None
        if self.is_first_step:
            self.updates[held] = self._update_of(held)
        self.updates[held].run(first=self.is_first_step)
        self.requests.drop((gradient.storage,))

    def after_backward(self, unit: int, gradients: Sequence[Gradient]) -> list[int]:  # noqa: ARG002 -- of any unit
        """Update parameters with gradients that are complete only now, such as a tied embedding's."""
        for gradient in gradients:
            self.gradient_ready(gradient)
        return []

    def after_step(self) -> None:
        """Record that all optimizer states exist."""
        self.is_first_step = False

    def _update_of(self, parameter: LocalParameter) -> OptimizerUpdate:
        """Return an optimizer with one parameter."""
        options = self.choices[parameter]
        return OptimizerUpdate(
            self.requests, LocalParameters((parameter._replace(count=1),)), options.update, options.card
        )
