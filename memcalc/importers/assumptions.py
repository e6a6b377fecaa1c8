"""Values that a file does not set: the candidate with the largest peak is assumed, and its effect is recorded.

A question may depend on the answer to another one: the version of TRL matters only if TRL runs the file. So each
candidate is compared with those answers to the dependent questions that give it the largest peak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from memcalc.errors import InputError, MemcalcError
from memcalc.frameworks.draft import OpenQuestion
from memcalc.importers.field_tables import ImportedConfig
from memcalc.spec.limits import Limit
from memcalc.spec.origin import Assumption

_ALIKE = 2 * 2**20  # bytes: the smallest segment that PyTorch reserves
Answers = Mapping[str, str]


class _ResolvedDraft(NamedTuple):
    """A configuration with answers to all of its open questions.

    Args:
        imported: the imported configuration.
        peak_bytes: its allocated peak per GPU.
        moved: for each open question the assumed candidate, the one with the smallest peak, and the difference.
        rejected: candidates with which the run is invalid or not modelled, each with the error.
        others: for each question, the configurations with the largest peak of the candidates that are not assumed.
    """

    imported: ImportedConfig
    peak_bytes: int
    moved: tuple[tuple[OpenQuestion, str, str, int], ...]
    rejected: tuple[tuple[OpenQuestion, str, MemcalcError], ...] = ()
    others: tuple[ImportedConfig, ...] = ()


def settle(read: Callable[[Answers], ImportedConfig], peak: Callable[[ImportedConfig], int]) -> ImportedConfig:
    """Return a file's configuration with the answers that give the largest peak.

    Args:
        read: function that imports the file with answers to its questions. Raises InputError if it cannot.
        peak: function that returns the allocated peak of an imported configuration, bytes per GPU. Raises MemcalcError
            if the configuration is invalid or not modelled.

    Returns:
        The imported configuration. Its assumptions are the questions with different peaks, the largest difference
        first. A candidate that is rejected is one of its limits, since the run may need more with it. A file that
        cannot be estimated gets the first candidate of each question.

    Raises:
        InputError: the file cannot be imported.
    """
    first = read({})
    if not first.questions:
        return first
    sizes: dict[str, int | MemcalcError] = {}

    def sized(config: ImportedConfig) -> int:
        key = repr(config.blocks)
        if key not in sizes:
            try:
                sizes[key] = peak(config)
            except MemcalcError as error:
                sizes[key] = error
        size = sizes[key]
        if isinstance(size, MemcalcError):
            raise size
        return size

    def largest(answers: Answers, config: ImportedConfig) -> _ResolvedDraft:
        question = next((each for each in config.questions if each.field not in answers), None)
        if question is None:
            return _ResolvedDraft(config, sized(config), ())
        known: dict[str, _ResolvedDraft] = {}
        rejected: list[tuple[OpenQuestion, str, MemcalcError]] = []
        for candidate in question.candidates:  # without an answer, it was read with the first one
            further = {**answers, question.field: candidate}
            try:
                known[candidate] = largest(further, config if candidate == question.candidates[0] else read(further))
            except MemcalcError as error:
                rejected.append((question, candidate, error))
        if not known:
            raise rejected[0][2]
        taken = _largest({candidate: each.peak_bytes for candidate, each in known.items()})
        least = min(known, key=lambda each: known[each].peak_bytes)
        moved = max(known[taken].peak_bytes - known[least].peak_bytes, 0)
        return known[taken]._replace(
            moved=(*known[taken].moved, (question, taken, least, moved)),
            rejected=(*known[taken].rejected, *rejected),
            others=(*known[taken].others, *(each.imported for name, each in known.items() if name != taken)),
        )

    try:
        return _imported(largest({}, first))
    except MemcalcError:
        return first


def _imported(found: _ResolvedDraft) -> ImportedConfig:
    """Return the configuration with its assumptions, and with its rejected candidates as limits."""
    assumptions = tuple(
        Assumption(question.field, question.description, taken, otherwise, moved, found.peak_bytes)
        for question, taken, otherwise, moved in sorted(found.moved, key=lambda each: -each[3])
        if moved
    )
    limits, notes = list(found.imported.limits), list(found.imported.notes)
    for question, candidate, error in found.rejected:
        limits.append(Limit(f"{candidate} as {question.description}", holds_memory=True))
        problem = error.problem if isinstance(error, InputError) else str(error)
        setting = question.field.partition(".")[2]
        notes.append(f"not modelled: {candidate} as {question.description}: {problem} Set the field: --set {setting}=.")
    others = tuple({repr(each.blocks): each for each in found.others}.values())
    return replace(found.imported, assumptions=assumptions, limits=tuple(limits), notes=tuple(notes), others=others)


def _largest(peaks: Mapping[str, int]) -> str:
    """Return the candidate with the largest peak; of those that differ by less than a segment, the first.

    Allocated memory does not say which of these reserves more: a foreach optimizer step can reserve 10% more than a
    fused one, although both runs have their peak in backward, where the fused optimizer has a few KiB more of states.
    """
    most = max(peaks.values())
    return next(candidate for candidate, peak in peaks.items() if peak > most - _ALIKE)
