"""Estimate a generation: from a spec to the ledger of every rank, with weights, KV caches and peaks of each phase."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.estimation.estimate import UNKNOWN, family_notes
from memcalc.estimation.limits import limits_of
from memcalc.generation.forward_peak import forward_peaks, peak_rows
from memcalc.generation.forwards import phases_of
from memcalc.generation.kv_cache_size import cache_bytes, pool_items
from memcalc.layout.local_parameters import LocalParameters, stage_parameters
from memcalc.layout.parameters import buffer_elements
from memcalc.layout.peft_parameters import all_parameters
from memcalc.layout.stages import Stage, stages_of
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger, Rows
from memcalc.ledger.result import Generation, RankResult, Result, known
from memcalc.ledger.row_drafts import RowDraft
from memcalc.ledger.row_writer import write_rows
from memcalc.ledger.textbook import generation_textbook
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.states.parameter_copies import UNSHARDED, ParameterCopy, copy_row
from memcalc.states.persistent import registered_buffers, workspace
from memcalc.states.recipe_copies import kept_copies
from memcalc.states.state_options import StateOptions, groups, state_options
from memcalc.states.state_remainders import state_remainders
from memcalc.stream.requests import AllocatorOverhead


def generation(spec: Spec, played: AllocatorOverhead | None = None) -> Result:
    """Return the memory of each GPU during prefill and decoding, and the verdict; `played` as in `estimate`."""
    gpu = spec.gpu
    ranks = [rank_result(spec, stage, gpu, played) for stage in stages_of(spec)]
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
        gpu=gpu,
        limits=limits_of(spec),
        notes=(*spec.origin.notes, *_notes(spec)),
        generation=Generation(
            bytes_per_token=cache_bytes(spec, inference.block) // inference.block,
            bytes_per_sequence=cache_bytes(spec, inference.context_length),
        ),
    )


def rank_result(spec: Spec, stage: Stage, gpu: GpuSpec | None, played: AllocatorOverhead | None = None) -> RankResult:
    """Return the ledger of the ranks of one stage and the memory outside it."""
    assert spec.inference is not None
    phases = phases_of(spec.inference)
    items = list(_standing(spec, stage, gpu, phases))
    for phase, moment in forward_peaks(spec, stage, gpu).items():
        items += peak_rows(moment, 1 << phases.index(phase))
    remainders = {(1 << len(phases)) - 1: _tails(spec, stage)}
    if played is not None:
        remainders = {1 << bit: played.remainders[phase] for bit, phase in enumerate(phases)}
    ledger = Ledger((Rows(write_rows(items, "all tensors", remainders, phases)),), phases)
    return RankResult({"pipeline_stage": stage.index}, ledger, known(UNKNOWN))


def allocated_bytes(spec: Spec, stage: Stage, gpu: GpuSpec | None) -> int:
    """Return the peak allocated bytes of the ranks of a stage, without the rows of the ledger."""
    assert spec.inference is not None
    phases = phases_of(spec.inference)
    moments = forward_peaks(spec, stage, gpu)
    tails = _tails(spec, stage)
    totals = {phase: tails + (moments[phase].bytes if phase in moments else 0) for phase in phases}
    for item in _standing(spec, stage, gpu, phases):
        for bit, phase in enumerate(phases):
            totals[phase] += item.block * item.count * (item.mask >> bit & 1)
    return max(totals.values())


def _standing(spec: Spec, stage: Stage, gpu: GpuSpec | None, phases: tuple[str, ...]) -> Iterator[RowDraft]:
    """Yield persistent items: weights, buffers, the prompt, a paged cache, cuBLAS's workspace."""
    inference = spec.inference
    assert inference is not None
    always = (1 << len(phases)) - 1
    for group, _, copies in _weights(spec, stage):
        yield from (copy_row(copy._replace(mask=always), held, UNSHARDED) for copy in copies for held in group)
    for item in registered_buffers(spec, stage):
        if item.component is Component.WEIGHTS:
            yield item._replace(mask=always)
    from_input, from_prefill = always - 1, always - 3
    shape = (inference.batch_size, inference.prompt_length)
    each = DTYPE_BYTES["int64"] * shape[0] * shape[1]
    citation = "torch.int64 token ids"
    yield RowDraft(
        Component.INPUTS, "batch", "token ids", shape, "int64", 1, each, rounded(each), from_input, "8·b·n_0", citation
    )
    yield from pool_items(spec, stage, from_input)
    yield workspace("forward", spec, gpu, from_prefill)


def _weights(spec: Spec, stage: Stage) -> Iterator[tuple[LocalParameters, StateOptions, list[ParameterCopy]]]:
    """Yield the parameters of a rank in groups with identical options, each with its one copy."""
    for group, choice, _ in groups(stage_parameters(spec, stage), state_options(spec)):
        yield group, choice, list(kept_copies(choice, trains=False))


def _tails(spec: Spec, stage: Stage) -> int:
    """Return the unsplit remainders in bytes when weights are allocated in sequence."""
    found = (state_remainders(group, choice, copies, ()) for group, choice, copies in _weights(spec, stage))
    return sum(amount for each in found for amount in each.values())


def _notes(spec: Spec) -> Iterator[str]:
    yield from family_notes(spec)
    if spec.parallelism.data_parallel > 1:
        yield f"data_parallel = {spec.parallelism.data_parallel}: as many replicas, each with a separate batch."
