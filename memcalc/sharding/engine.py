"""The hooks of a sharding engine around the units of a model: its layers, and the root with all other parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.states.state_options import FsdpOptions, StateOptions
from memcalc.stream.requests import Requests

# Layers are numbered units; the root has embeddings, final norm and LM head, unless these are separate units.
ROOT, EMBEDDING, TAIL = -1, -2, -3
ONE_ROOT = FsdpOptions()

# The pass that calls a compiled kernel; "forward alone": no backward follows, because a checkpoint recomputes it.
KernelPass = Literal["forward", "forward alone", "backward"]

# The parameters that the optimizer updates, by dtype, each with the options of their states.
OptimizerGroups = Sequence[tuple[LocalParameters, StateOptions]]


class Gradient(NamedTuple):
    """A gradient that autograd has produced: its storage, and its parameter (None if unknown)."""

    storage: int
    parameter: LocalParameter | None


class Engine:
    """A single GPU without sharding: weights are resident, gradients stay where autograd allocates them.

    Subclasses model the allocations of PyTorch or DeepSpeed around units, in the order of their sources.
    """

    keeps_gradients = True  # whether gradients stay as autograd made them, and later micro-batches are added to them
    hooks_gradients = False  # whether the engine takes over each gradient when its operator's backward has ended
    frees_gradients = False  # whether the optimizer step frees the gradients
    hooks_modules = False  # whether it has hooks around each module with parameters, not only around units
    reduces_modules = False  # whether it takes over the gradients of a hooked module when the module's backward ends
    wraps_embedding_and_head = False  # whether the embedding is a unit, and final norm and LM head are another
    head_is_unit = False  # whether the LM head's unit is prepared for the gradient of the logits, not of the output
    output_is_loss = False  # whether the loss is part of the root's forward
    order_is_stale = False  # whether the units of an evaluation are still in the order that backward follows
    repeats = True  # whether micro-batches and steps after the first make the same requests and frees
    sum_stream = 0  # the CUDA stream on which autograd adds the gradients of a tied weight
    hooks_first_runs = False  # whether operators that compile a kernel or use a buffer are run for the first time
    runs_backward = True  # otherwise it is the engine of a model that scores batches alone
    scores_itself = False  # whether it has hooks in a forward without adapters between the policy's and its backward
    scales_output_gradient = False  # whether a hook replaces the gradient of the model's output by a scaled one

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self.rounds: Mapping[int, int] = {}  # units that represent several equal ones, as in `Requests.repeat`

    @property
    def has_unsharded_gradients(self) -> bool:
        """Whether unreduced gradients of earlier micro-batches exist."""
        return False

    def wrap(self, weights: Sequence[int]) -> None:
        """Wrap the module, before the optimizer is built.

        Args:
            weights: the storages of trained parameters, in registration order; the engine may replace them.
        """

    def updated(self, groups: OptimizerGroups) -> OptimizerGroups:
        """Return the parameters that the optimizer updates, given the trained parameters by dtype."""
        return groups

    def existing(self) -> list[int]:
        """Record gradients of a step's earlier micro-batches, if the engine takes gradients over.

        Returns:
            The storages of these gradients, labeled with the component of gradients.
        """
        return []

    def hold_gathered(self) -> None:
        """Record the parameters that earlier micro-batches have left gathered, which are counted elsewhere."""

    def gather_before_backward(self) -> None:
        """Record the parameters that another micro-batch's backward has gathered since the last forward."""

    def resume(self) -> None:
        """Set the state before a steady step's last micro-batch, and record the engine's tensors from earlier ones."""

    def prepare(self) -> None:
        """Run one-time work before a micro-batch; called before each of them."""

    def begin(self, *, have_gradients: bool, last: bool) -> None:
        """Begin a micro-batch.

        Args:
            have_gradients: whether gradients of earlier micro-batches exist, to which it adds.
            last: whether the optimizer step follows it.
        """

    def before_forward(self, unit: int) -> None:
        """Run before a unit's forward; the root's forward spans the whole forward."""

    def after_forward(self, unit: int) -> None:
        """Run after a unit's forward."""

    def before_loss(self) -> None:
        """Run before the loss that the model's own forward computes."""

    def before_backward(self, unit: int) -> None:
        """Run when the gradient of a unit's output has been produced."""

    def after_backward(self, unit: int, gradients: Sequence[Gradient]) -> list[int]:  # noqa: ARG002 -- for subclasses
        """Run when the gradient of a unit's input has been produced, and for the root at the end of backward.

        Args:
            unit: the unit.
            gradients: gradients of its parameters, which the engine takes over.

        Returns:
            The storages of gradients that stay until `zero_grad`.
        """
        return [gradient.storage for gradient in gradients]

    def gradient_ready(self, gradient: Gradient) -> None:
        """Take over a gradient that autograd has produced, if the engine hooks gradients."""
        raise NotImplementedError

    def after_last_backward(self, gradients: list[int]) -> list[int]:
        """Run after the last backward of a step, while the script still references the loss and the logits.

        Args:
            gradients: the storages of gradients of all micro-batches.

        Returns:
            The storages that stay allocated.
        """
        return gradients

    def begin_inference(self) -> None:
        """Begin a pipeline's first pass, which runs without a schedule and reduces nothing."""

    def end_inference(self) -> None:
        """End a pipeline's first pass: no parameters stay gathered."""

    def unshard(self) -> None:
        """Gather all units at once: the schedule of a pipeline is about to run this chunk of the model."""

    def reshard(self) -> None:
        """Free the gathered parameters of all units: the schedule of a pipeline runs other chunks next."""

    def reduce_gradients(self) -> list[int]:
        """Reduce the gradients after the last micro-batch of a chunk; return the storages of those that are new."""
        return []

    def begin_evaluation(self) -> None:
        """Begin a batch without gradients, between steps."""

    def after_evaluation(self) -> None:
        """Run after the forward passes of an evaluation, which have no backward."""

    def begin_scoring(self) -> None:
        """Begin a forward outside autograd that scores a micro-batch, by a model of its own or without adapters."""
        self.begin_evaluation()

    def after_scoring(self) -> None:
        """Run after that forward; what stays gathered until a backward stays for good where none follows."""
        if self.runs_backward:
            self.after_evaluation()

    def module_of(self, unit: int, name: str) -> str:  # noqa: ARG002 -- for subclasses
        """Return the module that the engine hooks ("": none), given the unit and the name of an operator's module."""
        return name

    def before_module(self, unit: int, module: str, *, again: bool) -> None:
        """Run before a module's forward or backward, if the engine hooks modules.

        Args:
            unit: the unit of the module.
            module: name of the module in the unit.
            again: whether it is a recomputation during backward.
        """

    def first_buffer(self, name: str) -> None:
        """Allocate a persistent buffer before the operator that uses it, if the engine hooks first runs."""

    def first_kernel(self, name: str, passing: KernelPass, result: int) -> None:
        """Run when an operator that calls a compiled kernel has allocated its results, if the engine hooks first runs.

        Args:
            name: the compiled function.
            passing: the pass that calls it.
            result: bytes of the operator's result.
        """

    def module_gradients(self, gradients: Sequence[Gradient]) -> None:
        """Take over the gradients of a hooked module, before `after_module`, if the engine reduces modules."""
        raise NotImplementedError

    def after_module(self) -> None:
        """Run after the forward or backward of the last module that was entered."""

    def omit_backward(self) -> None:
        """Prepare for a model that scores batches alone: no backward follows a forward."""
        self.runs_backward = False

    def zero_gradients(self) -> list[int]:
        """Allocate the gradients, all zeros, with which it updates once when it is made; return their storages.

        Without such an update the first step creates the optimizer's states.
        """
        return []

    def before_step(self, gradients: list[int]) -> None:
        """Run before the optimizer step, which frees the gradients given.

        Args:
            gradients: the storages of gradients that the step frees; empty if it does not.
        """

    def before_update(self, number: int) -> None:
        """Run before the update of a group, as returned by `updated`."""

    def after_update(self, number: int) -> None:
        """Run after the update of a group."""

    def after_step(self) -> None:
        """Run after the optimizer step."""


def is_embedding(parameter: LocalParameter) -> bool:
    """Return whether a parameter is the embedding's, a separate unit with `wraps_embedding_and_head`."""
    return parameter.where == "embedding" and parameter.module.partition(".")[0] == "embed_tokens"


def is_output(parameter: LocalParameter) -> bool:
    """Return whether a parameter is the LM head's or its adapter's."""
    return parameter.module.partition(".")[0] == "lm_head"


def by_unit(
    ordered: Sequence[LocalParameter], layers: Sequence[int], fsdp: FsdpOptions = ONE_ROOT
) -> Mapping[int, tuple[LocalParameter, ...]]:
    """Return the parameters of each unit in registration order.

    In a tied unit the final norm precedes the embedding (Accelerate 1.15 utils/fsdp_utils.py, fsdp2_prepare_model).

    Args:
        ordered: all parameters, as `in_order` yields them.
        layers: the number of each layer in the model.
        fsdp: the units outside of layers; by default the root has all other parameters.
    """
    ends = fsdp.wraps_embedding_and_head
    inside = [parameter for parameter in ordered if parameter.where == "layer"]
    units: dict[int, list[LocalParameter]] = {ROOT: [], EMBEDDING: [], TAIL: []} if ends else {ROOT: []}
    for parameter in ordered:
        if parameter.where != "layer":
            in_tail = parameter.where == "head" and (fsdp.finds_norm or is_output(parameter))
            own = EMBEDDING if is_embedding(parameter) else TAIL if in_tail else ROOT
            units[own if ends else ROOT].append(parameter)
    if fsdp.ties_ends:
        units[ROOT].sort(key=lambda parameter: parameter.where != "head")
    numbers, layer, seen, kind = iter(layers), -1, set[LocalParameter](), ""
    for parameter in inside:
        prefix = parameter.module.partition("*")[0]
        if parameter in seen or prefix != kind:  # the first parameter of the next layer
            layer, seen, kind = next(numbers), set(), prefix
        seen.add(parameter)
        units.setdefault(layer, []).append(parameter)
    assert next(numbers, None) is None
    return {unit: tuple(found) for unit, found in units.items()}
