"""Batches of a context that are sized together: they have as many micro-batches in flight."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from memcalc.engine.points import Context
from memcalc.estimation.blocks.catalogue import Gradients, Part, program
from memcalc.estimation.blocks.structure import Structure
from memcalc.estimation.program import Program
from memcalc.estimation.stages import Stage, stages_of
from memcalc.spec.layers import masked_from
from memcalc.spec.spec import Spec

MOST = 16_384  # batches whose bytes are in memory at a time


class Alike(NamedTuple):
    """Batches of a context that have as many micro-batches in flight.

    Args:
        micro: the numbers of their values of each field of `BATCH`.
        lengths: likewise.
        steps: likewise.
        single: how many of `micro`, the first ones, have tapes of their own, since they are one sequence.
    """

    micro: list[int]
    lengths: list[int]
    steps: list[int]
    single: int

    @property
    def numbers(self) -> tuple[list[int], list[int], list[int]]:
        """Those of their values."""
        return self.micro, self.lengths, self.steps

    @property
    def kinds(self) -> list[int]:
        """The first of `micro` that have the same tapes."""
        return sorted({0, self.single} - {len(self.micro)})

    @property
    def lanes(self) -> tuple[slice, ...]:
        """Where those with the same tapes are in arrays."""
        ends = [each * len(self.lengths) for each in (*self.kinds, len(self.micro))]
        return tuple([slice(start, stop) for start, stop in pairwise(ends)])

    @property
    def halves(self) -> list[Alike]:
        """Half as many batches, twice."""
        if len(self.lengths) > len(self.micro):
            half = len(self.lengths) // 2
            return [self._replace(lengths=own) for own in (self.lengths[:half], self.lengths[half:])]
        half = len(self.micro) // 2
        return [
            self._replace(micro=self.micro[:half], single=min(self.single, half)),
            self._replace(micro=self.micro[half:], single=max(self.single - half, 0)),
        ]


def alike_batches(context: Context, steps: list[list[int]], *, differs: bool) -> Iterator[Alike]:
    """Batches that are sized together; `differs`: the tapes of several sequences are others than those of one.

    Sequence lengths that no rule allows are left out.
    """
    b, _, _ = context.batch
    lengths = np.flatnonzero(context.valid.any(axis=(0, 2))).tolist()
    single = [number for number, size in enumerate(b) if size == 1] if differs else []
    micro = [*single, *(number for number, size in enumerate(b) if size != 1 or not differs)]
    for own in _by_windows(context, lengths):
        most = max(MOST // len(own), 1)
        for start in range(0, len(micro), most):
            for alike in steps:
                yield Alike(micro[start : start + most], own, alike, min(max(len(single) - start, 0), most))


def _by_windows(context: Context, lengths: list[int]) -> list[list[int]]:
    """Sequence lengths apart that fill windows and that do not, whose layers have other tapes."""
    shortest = masked_from(context.spec)
    if not shortest:
        return [lengths]
    own = context.batch[1]
    parts = ([each for each in lengths if (own[each] >= shortest) is fills] for fills in (False, True))
    return [part for part in parts if part]


def alike_steps(spec: Spec, counts: tuple[int, ...]) -> list[list[int]]:
    """Accumulation counts that are alike: in whether there is any, and in how many micro-batches are in flight."""
    steps: dict[object, list[int]] = {}
    for number, count in enumerate(counts):
        flights = tuple([_in_flight(stage) for stage in stages_of(spec, count)])
        steps.setdefault((count > 1, flights), []).append(number)
    return list(steps.values())


@lru_cache(maxsize=1024)
def differs_from_one(structure: Structure) -> bool:
    """Whether the tapes of several sequences are others than those of one."""
    one, two = structure._replace(batched=False), structure._replace(batched=True)
    kept = Gradients(kept=True, main_dtype=None)
    layers: tuple[Part, ...] = ("dense layer", "expert layer") if one.has_experts else ("dense layer",)
    parts: tuple[Part, ...] = (*layers, "head", "embedding", "tables")
    return any(_streams(program(one, part, False, kept)) != _streams(program(two, part, False, kept)) for part in parts)


def _streams(block: Program) -> tuple[object, ...]:
    streams = (block.forward, block.loss, block.backward, block.region, block.names)
    return (block.kinds, block.kind_of, block.labels, *streams)


@lru_cache(maxsize=4096)
def _in_flight(stage: Stage) -> tuple[int, ...]:
    pieces = stage.chunks
    return tuple([held for piece in pieces for held in (piece.in_flight, piece.embeddings, piece.heads, piece.waiting)])
