"""Peaks of forward, loss and backward of one stage, and the tensors live at each.

A block's program (tape.py) gives its own peak. Around it, tensors saved by earlier blocks and gradients of later
blocks are live.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter

from memcalc.ledger.row_drafts import RowDraft
from memcalc.phase_peaks.backward_peak import BackwardPeak
from memcalc.phase_peaks.forward_peak import ForwardPeak
from memcalc.phase_peaks.peak_candidates import Holding, PeakCandidate, TransientPeak
from memcalc.programs.program import Stream
from memcalc.spec.recipes import DTYPE_BYTES

Counts = dict[tuple[int, int], int]  # (block, storage) -> number of live copies


class StageTimeline(ForwardPeak, BackwardPeak):
    """The three phases of one stage."""

    def highest(self, stream: Stream, workspace: RowDraft | None = None) -> TransientPeak:
        """Return the peak of a phase; `workspace` is allocated by backward's first matmul.

        The forward peak is that of the last micro-batch in flight. On a stage without LM head, the loss is the end of
        forward.
        """
        return self._best(self.candidates(stream, workspace))

    def candidates(self, stream: Stream, workspace: RowDraft | None = None) -> Iterator[PeakCandidate]:
        """Return the points of a phase that may be its peak, in order."""
        if stream == "backward":
            return self._backward_with(workspace)
        return self._forward_moments() if stream == "forward" else self._loss_moments()

    def _best(self, moments: Iterable[PeakCandidate]) -> TransientPeak:
        total, best = max(((self.bytes(moment), moment) for moment in moments), key=itemgetter(0))
        return TransientPeak(total, best)

    def bytes(self, candidate: PeakCandidate) -> int:
        """Return the bytes live at a point, rounded to blocks."""
        blocks = sum([self._bytes(block, storages) * count for block, storages, count in candidate.holdings])
        return blocks + sum([item.block * count for item, count in candidate.engine])

    def items(self, moments: Iterable[tuple[TransientPeak, int]]) -> Iterator[RowDraft]:
        """Yield what is live at some points, each with the mask of its phases, as items."""
        masks: dict[tuple[int, int, int], int] = {}
        for (_, candidate), mask in moments:
            for item, count in candidate.engine:
                yield item._replace(count=count, mask=mask)
            for (index, number), count in _counts(candidate.holdings).items():
                key = (index, number, count)
                masks[key] = masks.get(key, 0) | mask
        for (index, number, count), mask in masks.items():
            block = self.blocks[index]
            each = block.sized.exact[number]
            if not each:
                continue
            component, name, dtype, formula, citation = block.program.labels[number]
            size = block.sizes[number]
            shape = block.sized.shapes[number] or (each // DTYPE_BYTES[dtype],)
            yield RowDraft(component, block.name, name, shape, dtype, count, each, size, mask, formula, citation)


def _counts(holdings: list[Holding]) -> Counts:
    counts: Counts = {}
    for block, storages, count in holdings:
        for storage in storages:
            counts[block, storage] = counts.get((block, storage), 0) + count
    return counts
