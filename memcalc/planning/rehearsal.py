"""A planned run rehearsed: every request of it, in order, played to PyTorch's allocator.

The estimate knows what is asked for. What blocks keep beside that, rests of up to 1 MiB, depends on which blocks happen
to be free when a request comes; so two steps are played from the first weight on, by the same programs that the
estimate reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.estimation.allocation import Run
from memcalc.estimation.choice import Choice, choice_of
from memcalc.estimation.communication import communication_buffers
from memcalc.estimation.engines.buffers import Around
from memcalc.estimation.estimate import estimate
from memcalc.estimation.items import BIT, PHASES
from memcalc.estimation.optimizers.states import WHOLE, optimizer_states
from memcalc.estimation.passes import beside
from memcalc.estimation.planned import PlannedTimeline
from memcalc.estimation.recipe_copies import gradients_exist, is_made_in_backward, kept_copies
from memcalc.estimation.sharding import Held, Parameters, stage_parameters
from memcalc.estimation.stages import Stage, recomputed_count, stages_of
from memcalc.estimation.standing import standing_items, workspace
from memcalc.estimation.state_tails import Built, built_tensors
from memcalc.estimation.symbols import symbol_values
from memcalc.ledger.component import Component
from memcalc.ledger.result import Result
from memcalc.planning.passing import Passing
from memcalc.planning.requests import Requests
from memcalc.spec.cards import find_card
from memcalc.spec.segments import Segment, items_of
from memcalc.spec.spec import Spec


def estimate_rehearsed(spec: Spec) -> Result:
    """The estimate, with what blocks keep beside what is asked for as a rehearsal finds it, where there is one."""
    requests = rehearse(spec)
    return estimate(spec) if requests is None else estimate(spec, requests.rests)


def rehearse(spec: Spec) -> Requests | None:
    """Two steps of a run, played. None: more is allocated than the plan and the states, by an engine for instance."""
    stage = stages_of(spec)[0]
    choice, parameters = choice_of(spec), _as_built(spec, stage_parameters(spec, stage))
    if not _is_plain(spec, stage, choice, parameters):
        return None
    card = None if spec.hardware.gpu is None else find_card(spec.hardware.gpu)
    values, making = symbol_values(spec, card), workspace("forward", spec, card, 0)
    built = [*_standing(spec, stage), *_states(parameters, choice)]
    requests, threads = Requests(), set[str]()
    alive: dict[int, list[int]] = {}
    gradients: list[int] = []

    def step_of(number: int) -> Passing:
        gradients = beside(spec, Around(), exist=gradients_exist(choice, number))
        timeline = PlannedTimeline(spec, stage, values, *gradients)
        return Passing(requests, timeline, _plan(spec), making.each, threads)

    step = step_of(1)
    for phase in PHASES:
        requests.begin(phase)
        kind, _, number = phase.rpartition("_")
        for index, each in enumerate(built):
            if each.mask & BIT[phase] and index not in alive:
                alive[index] = [requests.take(size) for size in each.sizes]
        if kind == "zero_grad" and not choice.zeroes_gradients:
            requests.drop(gradients)
            gradients = []
        elif kind == "forward":
            step = step_of(int(number))
            step.forward()
        elif kind == "loss":
            step.loss()
        elif kind == "backward":
            gradients += step.backward()
        for index in [index for index in alive if not built[index].mask & BIT[phase] << 1]:
            requests.drop(alive.pop(index))
    return requests


def _is_plain(spec: Spec, stage: Stage, choice: Choice, parameters: Parameters) -> bool:
    """Whether all that is allocated is known in its order."""
    degrees = spec.parallelism
    return (
        stage.layers == spec.model.num_layers
        and degrees.data_parallel == degrees.tensor_parallel == degrees.context_parallel == 1
        and communication_buffers(spec, stage).around == Around()
        and not choice.accumulates
        and choice.engine != "megatron"
        and not choice.offloads
        and choice.update.optimizer in (*WHOLE, "sgd")
        and spec.model.layers_with_experts(0, stage.layers) in (0, stage.layers)  # layers that are alike
        and not any(held.dtype or not held.trains for held in parameters)
    )


def _as_built(spec: Spec, parameters: Parameters) -> Parameters:
    """The parameters as modules make them: gates and ups of the plain implementation's experts are two tensors."""
    if spec.training.implementation != "plain" or spec.model.moe is None:
        return parameters
    built: list[Held] = []
    for held in parameters:
        if held.module.endswith("experts.gate_up_proj"):
            axes = tuple((name, size // 2) if name == "2·F_e" else (name, size) for name, size in held.axes)
            built += [held._replace(axes=axes)] * 2
        else:
            built.append(held)
    return Parameters(built)


def _plan(spec: Spec) -> Segment:
    """All layers by name, whichever words the configuration has for them."""
    training, layers = spec.training, spec.model.num_layers
    if not isinstance(training.recompute, str):
        return items_of(training.recompute, layers)
    return items_of(tuple(n for n in range(layers) if recomputed_count(training, n, n + 1)), layers)


def _standing(spec: Spec, stage: Stage) -> Iterator[Built]:
    """The batch, and buffers of modules; workspaces appear with what asks for them."""
    for item in standing_items(spec, stage, None):
        if item.component is not Component.LIBRARY_WORKSPACE:
            yield Built(item.mask, (Run((item.each,), item.count),))


def _states(parameters: Parameters, choice: Choice) -> list[Built]:
    copies = [copy for copy in kept_copies(choice, trains=True) if not is_made_in_backward(copy, choice)]
    states = list(optimizer_states(parameters, choice.update, choice.spread(1)))
    return built_tensors(parameters, choice, copies, states, max(held.count for held in parameters))
