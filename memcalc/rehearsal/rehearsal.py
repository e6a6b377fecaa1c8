"""A run rehearsed: every request of it, in order, played to a model of PyTorch's allocator.

The estimate knows what is asked for. What blocks keep beside that, rests of up to 1 MiB, and what is reserved for all,
depends on which blocks happen to be free when a request comes; so steps are played from the first weight on, by the
same programs that the estimate reads.
"""

from __future__ import annotations

from dataclasses import replace

from memcalc.errors import OutOfMemory
from memcalc.estimation.choice import choice_of, groups
from memcalc.estimation.communication import communication_buffers
from memcalc.estimation.engines.buffers import Around
from memcalc.estimation.estimate import estimate
from memcalc.estimation.items import BIT, PHASES, STEPS
from memcalc.estimation.passes import beside
from memcalc.estimation.planned import PlannedTimeline
from memcalc.estimation.sharding import stage_parameters
from memcalc.estimation.stages import recomputed_count, stages_of
from memcalc.estimation.standing import workspace
from memcalc.estimation.symbols import symbol_values
from memcalc.ledger.result import Result
from memcalc.rehearsal.construction import Built, built_before_training, layers_with_experts
from memcalc.rehearsal.optimizer_step import OptimizerStep
from memcalc.rehearsal.passing import Passing
from memcalc.rehearsal.requests import Requests
from memcalc.spec.cards import find_card
from memcalc.spec.foreign import refuse_foreign
from memcalc.spec.segments import Segment, items_of
from memcalc.spec.spec import Spec

STEADY = tuple(phase for phase in PHASES if phase.endswith(f"_{STEPS}"))
PLAYED = (*PHASES, *STEADY)  # the steady step twice: where it finds its blocks settles with the first one
# Of a step's micro-batches the first makes gradients, the second finds them, and the third finds its blocks as all do.
MICRO_BATCHES = 3
NOT_COMPARED = ("adam-4bit", "galore")  # with any recorded run


def estimate_rehearsed(spec: Spec, alloc_conf: str = "") -> Result:
    """The estimate, with what the allocator adds as a rehearsal finds it; where there is none, a note says why.

    Args:
        spec: the run.
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF.

    Raises:
        InputError: PyTorch's release does not take these settings.
    """
    refuse_foreign(spec)
    if why := why_not(spec):
        result = estimate(spec)
        return replace(result, notes=(*result.notes, f"Not rehearsed: {why}; what is reserved is estimated."))
    return estimate(spec, rehearse(spec, alloc_conf).played)


def rehearse(spec: Spec, alloc_conf: str = "") -> Requests:
    """Three steps of a run, played; there must be no reason `why_not`.

    On a device that never runs out; if that reserves more than the card has, on the card: there the allocator gives
    cached blocks back before it fails. What does not live there is told as it is on the device without end.

    Raises:
        InputError: PyTorch's release does not take these settings.
    """
    torch = spec.training.torch_version.removeprefix("v")
    endless = Rehearsal(spec, Requests(alloc_conf, torch)).play()
    if spec.hardware.gpu is None:
        return endless
    card = find_card(spec.hardware.gpu)
    room = card.usable_bytes - card.context_bytes
    if endless.reserved_bytes <= room:
        return endless
    try:
        return Rehearsal(spec, Requests(alloc_conf, torch, room)).play()
    except OutOfMemory:
        return endless


class Rehearsal:
    """A run that is played, phase by phase.

    Args:
        spec: the run.
        requests: what it is played to.
    """

    passing_type = Passing

    def __init__(self, spec: Spec, requests: Requests) -> None:
        self.spec, self.stage, self.choice = spec, stages_of(spec)[0], choice_of(spec)
        card = None if spec.hardware.gpu is None else find_card(spec.hardware.gpu)
        self.values, self.workspace = symbol_values(spec, card), workspace("forward", spec, card, 0)
        parts = groups(stage_parameters(spec, self.stage), self.choice)
        self.built = [*built_before_training(spec, self.stage, self.choice)]
        self.requests = requests
        trained = [(parameters, own) for parameters, own, trains in parts if trains]
        self.step = OptimizerStep(requests, trained, layers_with_experts(spec))
        self.threads: set[str] = set()  # those that have a workspace of cuBLAS
        self.alive: dict[int, list[int]] = {}  # storages of what is built
        self.gradients: list[int] = []
        self.passing: Passing | None = None  # the micro-batch under way

    def play(self) -> Requests:
        """All phases."""
        for phase, following in zip(PLAYED, (*PLAYED[1:], ""), strict=True):
            self.requests.begin(phase)
            for index, each in enumerate(self.built):
                if each.mask & BIT[phase] and index not in self.alive:
                    self.alive[index] = self._make(each)
            self._run(phase)
            for index in [index for index in self.alive if following and not self.built[index].mask & BIT[following]]:
                self.requests.drop(self.alive.pop(index))
        return self.requests

    def _make(self, built: Built) -> list[int]:
        found: list[int] = []
        replaced = [self.requests.take(made.size) for made in built.replaced]
        for index, made in enumerate(built.tensors):
            before = [self.requests.play(made.before)] if made.before else []
            found.append(self.requests.take(made.size))
            self.requests.drop(before if made.stays else (*before, found.pop()))
            self.requests.drop(replaced[index : index + 1])
        return found

    def _run(self, phase: str) -> None:
        kind, _, number = phase.rpartition("_") if phase[-1].isdigit() else (phase, "", "")
        if kind == "optimizer":
            self.step.build()
        elif kind == "optimizer_step":
            self.step.run(first=phase == "optimizer_step_1")
        elif kind == "zero_grad" and not self.choice.zeroes_gradients:
            self.requests.drop(self.gradients)
            self.gradients = []
        elif kind == "forward":
            for _ in range(min(self.spec.training.gradient_accumulation_steps, MICRO_BATCHES) - 1):
                self._pass(number)
            self._forward()
        elif kind == "loss":
            self._loss()
        elif kind == "backward":
            self._backward()

    def _pass(self, number: str) -> None:
        """A micro-batch that is not the last one."""
        self.requests.begin(f"forward_{number}")
        self._forward()
        self.requests.begin(f"loss_{number}")
        self._loss()
        self.requests.begin(f"backward_{number}")
        self._backward()
        self.requests.begin(f"forward_{number}")

    def _forward(self) -> None:
        exist = bool(self.gradients)
        gradients = beside(self.spec, Around(), exist=exist)
        timeline = PlannedTimeline(self.spec, self.stage, self.values, *gradients)
        self.passing = self.passing_type(self.requests, timeline, _plan(self.spec), self.workspace.each, self.threads)
        self.passing.forward()

    def _loss(self) -> None:
        assert self.passing is not None
        self.passing.loss()

    def _backward(self) -> None:
        assert self.passing is not None
        self.gradients += self.passing.backward()


def why_not(spec: Spec) -> str:
    """Why the order of all that is allocated is not known; empty where it is."""
    choice, stage = choice_of(spec), stages_of(spec)[0]
    reasons = {
        "generation": spec.inference is not None,
        "several ranks": spec.parallelism.ranks > 1 or communication_buffers(spec, stage).around != Around(),
        "Megatron's buffers": choice.engine == "megatron",
        "offload to the host": choice.offloads or spec.training.offload_activations != "none",
        f"optimizer {choice.update.optimizer}": choice.update.optimizer in NOT_COMPARED,
    }
    return next((f"the order of requests is not known with {reason}" for reason, is_so in reasons.items() if is_so), "")


def _plan(spec: Spec) -> Segment:
    """All layers by name, whichever words the configuration has for them."""
    training, layers = spec.training, spec.model.num_layers
    if not isinstance(training.recompute, str):
        return items_of(training.recompute, layers)
    return items_of(tuple(n for n in range(layers) if recomputed_count(training, n, n + 1)), layers)
