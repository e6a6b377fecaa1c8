"""Largest batch and longest context of a generation that fit on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from memcalc.ledger.result import LargestBatchAndContext
from memcalc.spec.spec import Spec
from memcalc.units import largest_that_fits

MOST_SEQUENCES = 2**20
MOST_TOKENS = 2**24
NEAREST = 16  # the first step below a bound is this fraction of it


def largest(spec: Spec, possible: Callable[[Spec], bool], left: Callable[[Spec], float]) -> LargestBatchAndContext:
    """Return the largest batch at the run's context length, and the longest context at its batch size.

    The context is limited by the model's positions. Rotary positions can be extended, so a run that is already beyond
    them is limited by memory alone.

    Args:
        spec: the generation.
        possible: returns whether a lower bound admits the run with another batch or prompt.
        left: returns the bytes that it leaves free, negative if it does not fit; takes longer.
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

    most_sequences = largest_that_fits(lambda value: possible(batches(value)), MOST_SEQUENCES)
    admitted = largest_that_fits(lambda value: possible(prompts(value)), most_tokens)
    batch = _most_below(lambda value: left(batches(value)), most_sequences)
    prompt = _most_below(lambda value: left(prompts(value)), admitted)
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


def _most_below(left: Callable[[int], float], most: int) -> int:
    """Return a value up to `most` that fits although the next does not; 0 if 1 does not fit.

    First downward from `most` in steps that double: a bound is usually close. Then by interpolation: the bytes left are
    nearly linear in the value. Fragmentation makes them uneven, so the values that follow on the same side are also
    moved to the other side, in steps that double. Where the bytes do not help, by bisection.

    Args:
        left: returns the bytes that a value leaves free, negative if it does not fit; 0 if it fits because cached
            blocks are freed; -inf if they are unknown and it does not fit.
        most: at least 0.
    """
    if not most or (beyond_left := left(most)) >= 0:
        return most
    beyond, step = most, max(most // NEAREST, 1)
    while (known_left := left(known := max(beyond - step, 1))) < 0:
        if known == 1:
            return 0
        beyond, beyond_left, step = known, known_left, 2 * step
    step, fits = 1, True
    while beyond - known > 1:
        if known_left and beyond_left > -inf:
            value = known + int((beyond - known) * known_left / (known_left - beyond_left))
            value = max(value, known + step) if fits else min(value, beyond - step)
            value = min(max(value, known + 1), beyond - 1)
        else:
            value = (known + beyond) // 2
        found = left(value)
        step = 2 * step if (found >= 0) is fits else 1
        fits = found >= 0
        if fits:
            known, known_left = value, found
        else:
            beyond, beyond_left = value, found
    return known
