"""Estimate a generation: from a spec to the ledger of every rank, with weights, KV caches and peaks of each phase."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.estimation.allocation import rounded
from memcalc.estimation.choice import Choice, choice_of, groups
from memcalc.estimation.copies import UNSPREAD, Copy, copy_item
from memcalc.estimation.estimate import UNKNOWN, Played, family_notes
from memcalc.estimation.frozen import all_parameters
from memcalc.estimation.generation.forwards import phases_of
from memcalc.estimation.generation.moments import highest_moments, moment_items
from memcalc.estimation.generation.pools import cache_bytes, pool_items
from memcalc.estimation.items import Item
from memcalc.estimation.limits import limits_of
from memcalc.estimation.parameters import buffer_elements
from memcalc.estimation.recipe_copies import kept_copies
from memcalc.estimation.rows import write_rows
from memcalc.estimation.sharding import Parameters, stage_parameters
from memcalc.estimation.stages import Stage, stages_of
from memcalc.estimation.standing import registered_buffers, workspace
from memcalc.estimation.state_tails import state_tails
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.ledger.result import Generation, RankResult, Result, known
from memcalc.ledger.textbook import generation_textbook
from memcalc.spec.cards import Card, find_card
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec


def generation(spec: Spec, played: Played | None = None) -> Result:
    """Return the memory of each GPU during prefill and decoding, and the verdict; `played` as in `estimate`."""
    card = None if spec.hardware.gpu is None else find_card(spec.hardware.gpu)
    ranks = [rank_result(spec, stage, card, played) for stage in stages_of(spec)]
    ranks.sort(key=lambda rank: -rank.ledger.peak_bytes)
    inference = spec.inference
    assert inference is not None
    return Result(
        source="estimate",
        device=None,
        spec=spec,
        parameters=all_parameters(spec),
        trainable_parameters=0,
        buffer_elements=buffer_elements(spec.model),
        textbook=generation_textbook(spec),
        ranks=tuple(ranks),
        confidence="formula",
        card=card,
        limits=limits_of(spec),
        notes=(*spec.origin.notes, *_notes(spec)),
        generation=Generation(
            bytes_per_token=cache_bytes(spec, inference.block) // inference.block,
            bytes_per_sequence=cache_bytes(spec, inference.context_length),
        ),
    )


def rank_result(spec: Spec, stage: Stage, card: Card | None, played: Played | None = None) -> RankResult:
    """Return the ledger of the ranks of one stage and the memory outside it."""
    assert spec.inference is not None
    phases = phases_of(spec.inference)
    items = list(_standing(spec, stage, card, phases))
    for phase, moment in highest_moments(spec, stage, card).items():
        items += moment_items(moment, 1 << phases.index(phase))
    remainders = {(1 << len(phases)) - 1: _tails(spec, stage)}
    if played is not None:
        remainders = {1 << bit: played.rests[phase] for bit, phase in enumerate(phases)}
    ledger = Ledger((write_rows(items, "all tensors", remainders, phases),), phases)
    return RankResult({"pipeline_stage": stage.index}, ledger, known(UNKNOWN))


def allocated_bytes(spec: Spec, stage: Stage, card: Card | None) -> int:
    """Return the peak allocated bytes of the ranks of a stage, without the rows of the ledger."""
    assert spec.inference is not None
    phases = phases_of(spec.inference)
    moments = highest_moments(spec, stage, card)
    tails = _tails(spec, stage)
    totals = {phase: tails + (moments[phase].bytes if phase in moments else 0) for phase in phases}
    for item in _standing(spec, stage, card, phases):
        for bit, phase in enumerate(phases):
            totals[phase] += item.block * item.count * (item.mask >> bit & 1)
    return max(totals.values())


def _standing(spec: Spec, stage: Stage, card: Card | None, phases: tuple[str, ...]) -> Iterator[Item]:
    """Yield persistent items: weights, buffers, the prompt, a paged cache, cuBLAS's workspace."""
    inference = spec.inference
    assert inference is not None
    always = (1 << len(phases)) - 1
    for group, _, copies in _weights(spec, stage):
        yield from (copy_item(copy._replace(mask=always), held, UNSPREAD) for copy in copies for held in group)
    for item in registered_buffers(spec, stage):
        if item.component is Component.WEIGHTS:
            yield item._replace(mask=always)
    from_input, from_prefill = always - 1, always - 3
    shape = (inference.batch_size, inference.prompt_length)
    each = DTYPE_BYTES["int64"] * shape[0] * shape[1]
    citation = "torch.int64 token ids"
    yield Item(
        Component.INPUTS, "batch", "token ids", shape, "int64", 1, each, rounded(each), from_input, "8·b·n_0", citation
    )
    yield from pool_items(spec, stage, from_input)
    yield workspace("forward", spec, card, from_prefill)


def _weights(spec: Spec, stage: Stage) -> Iterator[tuple[Parameters, Choice, list[Copy]]]:
    """Yield the parameters of a rank in groups with identical options, each with its one copy."""
    for group, choice, _ in groups(stage_parameters(spec, stage), choice_of(spec)):
        yield group, choice, list(kept_copies(choice, trains=False))


def _tails(spec: Spec, stage: Stage) -> int:
    """Return the unsplit remainders in bytes when weights are allocated in sequence."""
    found = (state_tails(group, choice, copies, ()) for group, choice, copies in _weights(spec, stage))
    return sum(amount for each in found for amount in each.values())


def _notes(spec: Spec) -> Iterator[str]:
    yield from family_notes(spec)
    if spec.parallelism.data_parallel > 1:
        yield f"data_parallel = {spec.parallelism.data_parallel}: as many replicas, each with a separate batch."
