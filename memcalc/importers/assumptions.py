"""Values that a file does not set: the candidate with the largest peak is assumed, and its effect is recorded.

A question may depend on the answer to another one: the version of TRL matters only if TRL runs the file. So each
candidate is compared with those answers to the dependent questions that give it the largest peak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from memcalc.frameworks.draft import OpenQuestion
from memcalc.importers.field_tables import ImportedConfig
from memcalc.spec.origin import Assumption

_NAMES = ("framework", "versions")  # fields that affect memory only through other fields
_ALIKE = 2 * 2**20  # bytes: the smallest segment that PyTorch reserves
Answers = Mapping[str, str]


class _ResolvedDraft(NamedTuple):
    """A configuration with answers to all of its open questions.

    Args:
        imported: the imported configuration.
        peak_bytes: its allocated peak per GPU.
        moved: for each open question the assumed candidate, the one with the smallest peak, and the difference.
    """

    imported: ImportedConfig
    peak_bytes: int
    moved: tuple[tuple[OpenQuestion, str, str, int], ...]


def settle(read: Callable[[Answers], ImportedConfig], peak: Callable[[ImportedConfig], int | None]) -> ImportedConfig:
    """Return a file's configuration with the answers that give the largest peak.

    Args:
        read: function that imports the file with answers to its questions.
        peak: function that returns the allocated peak of an imported configuration, bytes per GPU; None: no estimate.

    Returns:
        The imported configuration. Its assumptions are the questions with different peaks, the largest difference
        first. A file that cannot be estimated gets the first candidate of each question.
    """
    first = read({})
    if not first.questions:
        return first
    sizes: dict[str, int | None] = {}

    def sized(config: ImportedConfig) -> int | None:
        training = {name: value for name, value in config.blocks.get("training", {}).items() if name not in _NAMES}
        key = repr({**config.blocks, "training": training})
        if key not in sizes:
            sizes[key] = peak(config)
        return sizes[key]

    def largest(answers: Answers, config: ImportedConfig) -> _ResolvedDraft | None:
        question = next((each for each in config.questions if each.field not in answers), None)
        if question is None:
            size = sized(config)
            return None if size is None else _ResolvedDraft(config, size, ())
        tried: dict[str, _ResolvedDraft | None] = {}
        for candidate in question.candidates:  # without an answer, it was read with the first one
            further = {**answers, question.field: candidate}
            tried[candidate] = largest(further, config if candidate == question.candidates[0] else read(further))
        known = {candidate: each for candidate, each in tried.items() if each is not None}
        if len(known) < len(tried):
            return None
        taken = _largest({candidate: each.peak_bytes for candidate, each in known.items()})
        least = min(known, key=lambda each: known[each].peak_bytes)
        moved = max(known[taken].peak_bytes - known[least].peak_bytes, 0)
        return known[taken]._replace(moved=(*known[taken].moved, (question, taken, least, moved)))

    found = largest({}, first)
    if found is None:
        return first
    assumptions = [
        Assumption(question.field, question.description, taken, otherwise, moved, found.peak_bytes)
        for question, taken, otherwise, moved in sorted(found.moved, key=lambda each: -each[3])
        if moved
    ]
    return replace(found.imported, assumptions=tuple(assumptions))


def _largest(peaks: Mapping[str, int]) -> str:
    """Return the candidate with the largest peak; of those that differ by less than a segment, the first.

    Allocated memory does not say which of these reserves more: a foreach optimizer step can reserve 10% more than a
    fused one, although both runs have their peak in backward, where the fused optimizer has a few KiB more of states.
    """
    most = max(peaks.values())
    return next(candidate for candidate, peak in peaks.items() if peak > most - _ALIKE)
