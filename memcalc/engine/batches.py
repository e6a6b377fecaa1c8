"""All batches of one context: every stage of the pipeline, and the one that needs most."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.engine.atoms import Atoms, Batches, Rules, TooLarge
from memcalc.engine.points import Context
from memcalc.engine.stage import StageTotals
from memcalc.engine.table import COMPONENTS
from memcalc.estimation.blocks.catalogue import Gradients, Part, program
from memcalc.estimation.blocks.structure import Structure, structure_of
from memcalc.estimation.estimate import estimate
from memcalc.estimation.items import PHASES
from memcalc.estimation.outside import outside_allocated, reserved_bytes
from memcalc.estimation.program import Program
from memcalc.estimation.stages import Stage, stages_of, stages_that_matter
from memcalc.ledger.result import Result
from memcalc.spec.cards import Card, find_card
from memcalc.spec.segments import has_segments
from memcalc.spec.spec import Spec

Integers = npt.NDArray[np.int64]
Place = tuple[Any, ...]  # an index of an array with an axis for each field of `BATCH`

NUMBERS = ("peak_bytes", "peak_phase", "pipeline_stage", "reserved_bytes", "device_bytes", "usable_bytes")

FEW = 6  # configurations of one context that are sized one by one: arrays pay from here on
MOST = 65_536  # configurations whose arrays are in memory at a time
MOST_ATOMS = 256  # tables of sizes that are kept


class Found(NamedTuple):
    """The results of some batches.

    Args:
        where: what they are for: numbers of the values of each field of `BATCH`, or slices where these are neighbours.
        numbers: what `NUMBERS` names, each of a shape that fits `where`. [numbers, ...]
        phases: [phases, micro_batch_size, sequence_length, 1]
        components: [components, ...] at the peak.
        ledger: [phases, components, ...], if asked for.
    """

    where: Place
    numbers: Integers
    phases: Integers
    components: Integers
    ledger: Integers | None


class Sizer:
    """Sizes contexts; what several of them share is kept."""

    def __init__(self, *, ledger: bool) -> None:
        self._ledger = ledger
        self._rules: dict[object, Rules] = {}
        self._atoms: dict[object, tuple[Batches, Atoms]] = {}

    def found(self, context: Context) -> Iterator[Found]:
        """The results of a context's batches, in pieces; those that cannot be are left out or without meaning.

        Raises:
            InputError: it is not modelled.
        """
        if context.valid.size <= FEW or has_segments(context.spec.training.recompute):
            yield from self._one_by_one(context, np.argwhere(context.valid))
            return
        for micro, lengths, steps in _alike(context):
            try:
                yield self._together(context, micro, lengths, steps)
            except TooLarge:
                indices = np.array(list(product(micro, lengths, steps)))
                yield from self._one_by_one(context, indices[context.valid[tuple(indices.T)]])

    def _together(self, context: Context, micro: list[int], lengths: list[int], steps: list[int]) -> Found:
        b, s, m = context.batch
        own = (tuple(b[i] for i in micro), tuple(s[i] for i in lengths))
        update = {
            "micro_batch_size": own[0][0],
            "sequence_length": own[1][0],
            "gradient_accumulation_steps": m[steps[0]],
        }
        spec = context.spec.model_copy(update={"training": context.spec.training.model_copy(update=update)})
        card = None if spec.hardware.gpu is None else find_card(spec.hardware.gpu)
        batches, atoms = self._sizes(spec, card, own)
        peak: npt.NDArray[np.float64] | None = None
        count = len(batches.micro_batch_size)
        stage = np.zeros(count, dtype=np.int64)
        of_kinds = stages_that_matter(spec)
        over = batches.on(spec)
        stages = [StageTotals(spec, over, atoms, each, card) for each in of_kinds]
        for number, each in enumerate(stages):
            highest = each.peak
            if peak is None:
                peak, totals = highest, each.totals
            else:
                if number == 1:
                    peak, totals = peak.copy(), totals.copy()
                more = highest > peak
                if more.any():
                    stage[more] = number
                    np.copyto(peak, highest, where=more)
                    np.copyto(totals, each.totals, where=more)
        assert peak is not None
        phase = np.zeros(count, dtype=np.int64)
        for number in range(len(PHASES) - 1, -1, -1):  # the first of equal ones is written last
            phase[totals[number] == peak] = number
        number_of = np.array([each.index for each in of_kinds])
        shape = (len(micro), len(lengths), 1)
        bytes_ = peak.astype(np.int64)
        reserved: Integers = reserved_bytes(bytes_)  # type: ignore[arg-type,assignment] # arrays count as numbers do
        outside = outside_allocated(spec, card, bytes_, reserved)  # type: ignore[arg-type]
        device = reserved + outside.device_context + outside.communication_library
        usable = np.full(count, -1 if card is None else card.usable_bytes)
        return Found(
            _place(micro, lengths, steps),
            np.array([bytes_, phase, number_of[stage], reserved, device, usable]).reshape(-1, *shape),
            totals.astype(np.int64).reshape(-1, *shape),
            _components(stages, stage, phase).reshape(-1, *shape),
            self._everything(stages, stage).reshape(len(PHASES), -1, *shape) if self._ledger else None,
        )

    def _sizes(
        self, spec: Spec, card: Card | None, own: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> tuple[Batches, Atoms]:
        training, parallelism = spec.training, spec.parallelism
        key = (
            *own,
            spec.model,
            card,
            training.implementation,
            training.loss_chunks,
            training.lora,
            parallelism.tensor_parallel,
            parallelism.context_parallel,
            parallelism.expert_parallel,
            parallelism.expert_width_ranks,
            parallelism.sequence_parallel,
        )
        if key not in self._atoms:
            while len(self._atoms) >= MOST_ATOMS:
                del self._atoms[next(iter(self._atoms))]
            b, s = np.meshgrid(*(np.array(each, dtype=np.int64) for each in own), indexing="ij")
            batches = Batches(b.ravel(), s.ravel())
            rules = self._rules.setdefault(own, Rules())
            self._atoms[key] = batches, Atoms(spec, card, batches, rules)
        return self._atoms[key]

    def _everything(self, stages: list[StageTotals], stage: Integers) -> Integers:
        table = np.empty((len(PHASES), len(COMPONENTS), len(stage)), dtype=np.int64)
        for phase in range(len(PHASES)):
            table[phase] = _components(stages, stage, np.full(len(stage), phase))
        return table

    def _one_by_one(self, context: Context, indices: npt.NDArray[np.intp]) -> Iterator[Found]:
        b, s, m = context.batch
        for i, j, k in indices.tolist():
            update = {"micro_batch_size": b[i], "sequence_length": s[j], "gradient_accumulation_steps": m[k]}
            spec = context.spec.model_copy(update={"training": context.spec.training.model_copy(update=update)})
            yield _single(_place([i], [j], [k]), estimate(spec), ledger=self._ledger)


def _place(*several: list[int]) -> Place:
    """Neighbours as slices, which arrays are written by much sooner."""
    if all(numbers[-1] - numbers[0] == len(numbers) - 1 for numbers in several):
        return tuple(slice(numbers[0], numbers[-1] + 1) for numbers in several)
    return np.ix_(*several)


def _single(where: Place, result: Result, *, ledger: bool) -> Found:
    rank, peak = result.headline, result.ledger.peak_bytes
    device = peak + rank.outside.cached_segments + rank.outside.device_context + rank.outside.communication_library
    usable = -1 if result.card is None else result.card.usable_bytes
    phase, stage = PHASES.index(result.ledger.peak_phase), rank.rank["pipeline_stage"]
    numbers = (peak, phase, stage, rank.reserved_bytes or 0, device, usable)
    table = np.array(
        [[result.ledger.components_by_phase[each].get(part, 0) for part in COMPONENTS] for each in PHASES],
        dtype=np.int64,
    )
    one = (1, 1, 1)
    return Found(
        where,
        np.array(numbers, dtype=np.int64).reshape(-1, *one),
        table.sum(axis=1).reshape(-1, *one),
        table[phase].reshape(-1, *one),
        table.reshape(*table.shape, *one) if ledger else None,
    )


def _components(stages: list[StageTotals], stage: Integers, phase: Integers) -> Integers:
    """Bytes by component of the headline stage in a phase of each configuration. [components, n]"""
    table = np.empty((len(COMPONENTS), len(stage)), dtype=np.int64)
    pairs = stage * len(PHASES) + phase
    for pair in np.flatnonzero(np.bincount(pairs)).tolist():
        lanes = np.flatnonzero(pairs == pair)
        table[:, lanes] = stages[pair // len(PHASES)].components(pair % len(PHASES), lanes)
    return table


def _alike(context: Context) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Batches that one set of arrays does for: the numbers of their values.

    One sequence or several are other tapes; of accumulation counts whether there is any, and how many micro-batches
    are in flight. Sequence lengths that no rule allows are left out.
    """
    b, s, m = context.batch
    lengths = [number for number in range(len(s)) if context.valid[:, number].any()]
    step = max(MOST // len(lengths), 1)
    micro = [list(range(len(b)))]
    if _differs_from_one(context.spec):
        micro = [[n for n, size in enumerate(b) if (size > 1) == several] for several in (False, True)]
    steps: dict[object, list[int]] = {}
    for number, count in enumerate(m):
        flights = tuple([_in_flight(stage) for stage in stages_of(context.spec, count)])
        steps.setdefault((count > 1, flights), []).append(number)
    for some in micro:
        for start in range(0, len(some), step):
            for alike in steps.values():
                yield some[start : start + step], lengths, alike


def _differs_from_one(spec: Spec) -> bool:
    """Whether the tapes of several sequences are others than those of one."""
    structure = structure_of(spec)
    return _tapes_differ(structure._replace(batched=False), structure._replace(batched=True))


@lru_cache(maxsize=1024)
def _tapes_differ(one: Structure, two: Structure) -> bool:
    kept = Gradients(kept=True, main_dtype=None)
    layers: tuple[Part, ...] = ("dense layer", "expert layer") if one.has_experts else ("dense layer",)
    parts: tuple[Part, ...] = ("embedding", "tables", *layers, "head")
    return any(_streams(program(one, part, False, kept)) != _streams(program(two, part, False, kept)) for part in parts)


def _streams(block: Program) -> tuple[object, ...]:
    streams = (block.forward, block.loss, block.backward, block.region, block.names)
    return (block.kinds, block.kind_of, block.labels, *streams)


@lru_cache(maxsize=4096)
def _in_flight(stage: Stage) -> tuple[int, ...]:
    pieces = stage.chunks
    return tuple([held for piece in pieces for held in (piece.in_flight, piece.embeddings, piece.heads, piece.waiting)])
