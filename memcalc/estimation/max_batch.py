"""Largest batch and longest context of a generation that fit on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.ledger.result import LargestBatchAndContext
from memcalc.spec.spec import Spec

MOST_SEQUENCES = 2**20
MOST_TOKENS = 2**24
NEAREST = 16  # the first step below a bound is this fraction of it


def largest(spec: Spec, possible: Callable[[Spec], bool], fits: Callable[[Spec], bool]) -> LargestBatchAndContext:
    """Return the largest batch at the run's context length, and the longest context at its batch size.

    The context is limited by the model's positions. Rotary positions can be extended, so a run that is already beyond
    them is limited by memory alone.

    Args:
        spec: the generation.
        possible: returns whether a lower bound admits the run with another batch or prompt.
        fits: returns whether it fits, which takes longer.
    """
    inference = spec.inference
    assert inference is not None
    within = inference.context_length <= spec.model.max_position_embeddings
    positions = spec.model.max_position_embeddings if within else MOST_TOKENS
    most_tokens = max(positions - inference.new_tokens, 1)

    def batches(value: int) -> Spec:
        return with_sizes(spec, batch_size=value)

    def prompts(value: int) -> Spec:
        return with_sizes(spec, prompt_length=value)

    batch = _most_below(lambda value: fits(batches(value)), _most(lambda n: possible(batches(n)), MOST_SEQUENCES))
    prompt = _most_below(lambda value: fits(prompts(value)), _most(lambda n: possible(prompts(n)), most_tokens))
    return LargestBatchAndContext(
        batch_size=batch,
        context_length=prompt + inference.new_tokens if prompt else 0,
        all_positions=within and prompt == most_tokens,
    )


def with_sizes(spec: Spec, *, batch_size: int | None = None, prompt_length: int | None = None) -> Spec:
    """Return the run with another batch size, or another prompt length and the same number of new tokens."""
    inference = spec.inference
    assert inference is not None
    batch, prompt = batch_size or inference.batch_size, prompt_length or inference.prompt_length
    changed = inference.model_copy(
        update={"batch_size": batch, "prompt_length": prompt, "context_length": prompt + inference.new_tokens}
    )
    training = spec.training.model_copy(update={"micro_batch_size": batch, "sequence_length": changed.chunk})
    return spec.model_copy(update={"inference": changed, "training": training})


def _most(fits: Callable[[int], bool], most: int) -> int:
    """Return a value up to `most` that fits although the next does not; 0 if 1 does not fit.

    Doubling, then bisection.
    """
    if not fits(1):
        return 0
    known, beyond = 1, 2
    while beyond <= most and fits(beyond):
        known, beyond = beyond, 2 * beyond
    if beyond > most:
        if known == most or fits(most):
            return most
        beyond = most
    while beyond - known > 1:
        middle = (known + beyond) // 2
        known, beyond = (middle, beyond) if fits(middle) else (known, middle)
    return known


def _most_below(fits: Callable[[int], bool], most: int) -> int:
    """Return a value up to `most` that fits although the next does not; 0 if 1 does not fit.

    Downward from `most` in steps that double, then bisection: a bound is usually close.
    """
    if not most or fits(most):
        return most
    step, beyond = max(most // NEAREST, 1), most
    while beyond > 1 and not fits(known := max(beyond - step, 1)):
        beyond, step = known, 2 * step
    if beyond == 1:
        return 0
    while beyond - known > 1:
        middle = (known + beyond) // 2
        known, beyond = (middle, beyond) if fits(middle) else (known, middle)
    return known
