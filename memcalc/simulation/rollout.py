"""Requests of the completions that a run generates between its steps, to train on them (GRPO).

Sources: see memcalc/generation/rollouts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from memcalc.allocator.pytorch.constants import SMALL_REQUEST
from memcalc.generation.forwards import DECODE, Forward, all_forwards
from memcalc.generation.rollouts import generating
from memcalc.ledger.component import Component
from memcalc.simulation.generation import GenerationRequests
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.stream.requests import Label, RecordedRequests, Requests

# Of longer completions only every n-th token is recorded: on 16 recorded programs of TRL's GRPO with up to 256 tokens,
# 1 of 8 changes reserved memory by 0.5% at most; on 9 sampled runs with up to 1,024 tokens, 1 of 64 does not.
MOST_LAYERS_RECORDED = 1_024


class Rollout(NamedTuple):
    """The requests of one generation, which free all that they allocate.

    Args:
        requests: the requests.
        labels: label of each storage.
    """

    requests: RecordedRequests
    labels: tuple[Label, ...]


@lru_cache(maxsize=8)  # of replays of one run with several sequence lengths
def rollout_of(spec: Spec) -> Rollout:
    """Return the requests of one generation of a run with `training.completion_length`."""
    return _RolloutRecorder(spec).rollout()


class _RolloutRecorder(GenerationRequests):
    """Recorder of the generation of a step: its prompts, its KV cache and its forward passes."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(generating(spec), Requests())
        self.has_workspace = True
        self.probabilities = -1  # a variable of the loop, until the next token's replace them
        self.steady = 0  # the first storage of the second new token

    def rollout(self) -> Rollout:
        """Record the generation, and free what is left of it.

        Small temporaries of all tokens but the first are left out: the first one's blocks serve them.
        """
        requests = self.requests
        mark = requests.mark()
        requests.drop(self._forwards())
        requests.drop(storage for caches in self.caches.values() for storage in caches)
        requests.drop((self.probabilities,))
        recorded = requests.since(mark)
        sizes = (change for change in recorded.script if change >= 0)
        small = {
            number
            for number, size in zip(recorded.made, sizes, strict=True)
            if number >= self.steady and size <= SMALL_REQUEST and requests.labels[number] is not Component.KV_CACHE
        }
        kept = recorded.without(small - recorded.parts.keys())
        return Rollout(kept, tuple(requests.labels[number] for number in kept.made))

    def _passes(self) -> Iterator[Forward]:
        """The prompts, the last token, and of the tokens between them as many as are recorded, at equal distances."""
        passes = list(all_forwards(self.inference))
        yield from passes[: -1 : ceil(len(passes) * self.spec.model.num_layers / MOST_LAYERS_RECORDED)]
        yield passes[-1]

    def _begin(self, forward: Forward) -> None:
        """All forward passes are in the phase of the generation."""
        if forward.phase == DECODE and not self.steady:
            _, self.steady = self.requests.mark()

    def _select(self) -> None:
        """Sample the next token: ATen native/Distributions.cpp, multinomial, divides by random numbers."""
        scores = DTYPE_BYTES["fp32"] * self.inference.batch_size * self.spec.model.vocab_size
        before, self.probabilities = self.probabilities, self.requests.take(scores, 0, Component.TEMPORARIES)
        if before >= 0:
            self.requests.drop((before,))
        self.requests.drop((self.requests.take(scores, 0, Component.TEMPORARIES),))
        super()._select()
