"""The training loop as most scripts write it, in the phases at which memory is evaluated.

    outputs = model(...); loss = ...; loss.backward(); optimizer.step()

A Python variable references the logits until backward has finished, as `outputs` does in such scripts, or until the
loss is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memcalc.errors import MemcalcError
from memcalc.ledger.component import Component
from memcalc.spec.spec import Spec
from memcalc.step.causal_lm import CausalLM, build
from memcalc.step.ema import Average, build_average
from memcalc.step.host import HOST, saving
from memcalc.step.meta_modules import place_inputs, tensors_in
from memcalc.step.optimizers import build_optimizer, hidden_matrices, state_tensors
from memcalc.step.quantization import quantized_tensors
from memcalc.step.recipes import Copies, autocast
from memcalc.step.unsupported import (
    NO_KERNEL,
    engine_of,
    no_kernel,
    no_split_update,
    refuse_modules,
    refuse_offload,
    refuse_parallel,
    stopped,
)

SHARDING = ("fsdp2", "dtensor")  # engines under which a rank's parameters are DTensor shards


class Observer(Protocol):
    """An observer of a run."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context for a phase; it is entered once per micro-batch for phases of micro-batches."""


class TrainingRun:
    """A few training steps of one rank on one device; its current tensors can be queried at any time.

    Args:
        spec: the run.
        device: any device that PyTorch can compute on.
        inputs: arguments of the model's forward, with labels; None: made from the spec.
    """

    def __init__(self, spec: Spec, device: torch.device, inputs: Mapping[str, Any] | None = None) -> None:
        refuse_parallel(spec)
        refuse_modules(spec)
        refuse_offload(spec, device)
        self.spec = spec
        self.engine = engine_of(spec)
        self.device = device
        self.model: CausalLM | None = None
        self.copies: Copies | None = None
        self.has_old_gradients = False  # gradients of the previous step
        self.optimizer: torch.optim.Optimizer | None = None
        self.average: Average | None = None
        self.given = inputs
        self.inputs: tuple[Any, Any] | None = None  # token ids and labels; else all arguments of forward, and None
        self.logits: Any = None  # or an output object that contains them

    def execute(self, steps: int, observer: Observer) -> None:
        """Build everything, then train.

        Raises:
            InputError: the device has no kernel for the requested attention, PyTorch cannot update sharded parameters
                with the optimizer, or the code of a family without formulas fails.
        """
        try:
            self._execute(steps, observer)
        except (MemcalcError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if NO_KERNEL in str(error):
                raise no_kernel(self.spec) from error
            if self.spec.model.transformers_config is not None:
                raise stopped(self.spec, error) from error
            raise

    def _execute(self, steps: int, observer: Observer) -> None:
        torch.manual_seed(0)
        with observer.phase("model"):
            model = self.model = self._build()
        with observer.phase("optimizer"):
            if self.engine == "ddp":
                from memcalc.step.ranks import replicated

                model = self.model = replicated(model, self.device)
            copies = self.copies = Copies(model.module.parameters(), self.spec.training)
            hidden = copies.optimized_as(hidden_matrices(model.module))
            tables = [part for part in model.module.modules() if isinstance(part, torch.nn.Embedding)]
            optimizer = self.optimizer = build_optimizer(self.spec.training, copies.optimized, hidden, tables)
            average = self.average = build_average(self.spec.training, model.module, copies.optimized)
        with observer.phase("input"):
            self.inputs = self._make_inputs(model)
        with model.contexts():
            for step in range(1, steps + 1):
                self.has_old_gradients = True
                with observer.phase(f"zero_grad_{step}"):
                    if self.spec.training.zero_grad_before == "forward":
                        self._zero_gradients(copies)
                for remaining in reversed(range(self.spec.training.gradient_accumulation_steps)):
                    if self.spec.parallelism.fsdp.gradient_sync == "last":
                        self._reduce_gradients(model, reduces=not remaining)
                    self._micro_batch(model, self.inputs, step, observer)
                with observer.phase(f"optimizer_step_{step}"):
                    self._update(copies, optimizer)
                    if average is not None:
                        average.update()

    def _reduce_gradients(self, model: CausalLM, *, reduces: bool) -> None:
        """Set whether the next backward of an FSDP model reduces its gradients."""
        if self.engine in SHARDING:
            from memcalc.step.ranks import reduce_gradients

            reduce_gradients(model, reduces=reduces)
        elif self.engine == "fsdp1":
            from memcalc.step import fsdp1

            fsdp1.reduce_gradients(model, reduces=reduces)

    def _zero_gradients(self, copies: Copies) -> None:
        """Free the gradients of the previous step, or zero them, once per step."""
        if self.has_old_gradients:
            copies.zero_grad(set_to_none=self.spec.training.zero_grad == "set_to_none")
        self.has_old_gradients = False

    def _update(self, copies: Copies, optimizer: torch.optim.Optimizer) -> None:
        try:
            copies.step(optimizer)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # includes NotImplementedError
            if self.engine in SHARDING:
                raise no_split_update(self.spec, error) from error
            raise

    def _build(self) -> CausalLM:
        if self.engine in SHARDING:
            # PyTorch's sharding takes half a second to import.
            from memcalc.step.ranks import build_sharded

            return build_sharded(self.spec, self.device)
        if self.engine == "fsdp1":
            from memcalc.step.fsdp1 import build_fsdp1

            return build_fsdp1(self.spec, self.device)
        return build(self.spec, self.device)

    def _micro_batch(self, model: CausalLM, inputs: tuple[Any, Any], step: int, observer: Observer) -> None:
        input_ids, labels = inputs
        with autocast(self.spec.training, self.device):
            with observer.phase(f"forward_{step}"), saving(self.spec):
                self.logits = model.logits(input_ids)
            with observer.phase(f"loss_{step}"):
                loss = model.loss(self.logits, labels)
                if self.spec.training.logits_until == "loss":
                    self.logits = None
                assert self.copies is not None
                self._zero_gradients(self.copies)
        with observer.phase(f"backward_{step}"):
            if self.spec.training.gradient_accumulation_steps > 1:
                loss = loss / self.spec.training.gradient_accumulation_steps
            loss.backward()  # type: ignore[no-untyped-call]
            self.copies.after_backward()
            if self.spec.training.logits_until != "step":
                self.logits = None
            del loss

    def _make_inputs(self, model: CausalLM) -> tuple[Any, Any]:
        if self.given is None and model.batch is None:
            return self._random_tokens(), self._random_tokens()
        given = self.given
        if given is None:
            assert model.batch is not None
            with _disable_current_modes():  # real tensors: the host makes a batch before it is copied to the device
                given = model.batch()
        return place_inputs(dict(given), self.device), None

    def _random_tokens(self) -> Tensor:
        shape = (self.spec.training.micro_batch_size, self.spec.training.sequence_length)
        return torch.randint(self.spec.model.vocab_size, shape, device=self.device)

    def _named_outputs(self) -> list[Any]:
        """Return the logits and loss of an output; its other tensors (hidden states) belong to the layers."""
        if isinstance(self.logits, Tensor):
            return [self.logits]
        return [getattr(self.logits, name, None) for name in ("logits", "loss")]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the inputs made for a model of any class."""
        if self.given is not None or self.model is None or self.model.batch is None or self.inputs is None:
            return ()
        shapes = [
            f"{name} {tuple(tensor.shape)}" for name, tensor in self.inputs[0].items() if isinstance(tensor, Tensor)
        ]
        return (f"Inputs made from the config.json: {', '.join(shapes)}. Others: --inputs FILE.py:NAME.",)

    def tensors_by_component(self) -> dict[Component, list[Tensor]]:
        """Return the tensors of known component, by component; activations and temporaries are unknown."""
        found: dict[Component, list[Tensor]] = {}
        if self.model is not None:
            module = self.model.module
            weights: list[Tensor] = [*module.parameters(), *module.buffers(), *quantized_tensors(module)]
            if self.engine in SHARDING:  # a parameter that is gathered temporarily is a buffer, not a weight
                ranks = self.spec.parallelism.ranks
                weights = [weight for weight in weights if _ranks_of(weight) == ranks]
            found[Component.WEIGHTS] = weights
        if self.copies is not None:
            found[Component.MASTER_WEIGHTS] = list(self.copies.masters)
            found[Component.GRADIENTS] = self.copies.gradients
        if self.optimizer is not None:
            found[Component.OPTIMIZER_STATE] = list(state_tensors(self.optimizer))
        if self.average is not None:
            found.setdefault(Component.OPTIMIZER_STATE, []).extend(self.average.tensors)
        if self.inputs is not None:
            found[Component.INPUTS] = tensors_in(self.inputs)
        if self.logits is not None:
            found[Component.LOGITS_AND_LOSS] = [each for each in self._named_outputs() if isinstance(each, Tensor)]
        # Adam counts its steps in CPU tensors, which use no GPU memory.
        return {
            component: [t for t in tensors if t.device.type == self.device.type or t.device == HOST]
            for component, tensors in found.items()
        }


def _ranks_of(tensor: Tensor) -> int:
    """Return the number of ranks that a tensor is sharded over: fewer for a gathered DTensor, 1 for other tensors."""
    mesh = getattr(tensor, "device_mesh", None)
    return 1 if mesh is None else mesh.size()
