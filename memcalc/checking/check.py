"""The logic of `check`: find the configurations, size each, compare it with its limit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from memcalc.checking.discovery import find_configs
from memcalc.checking.report import BUDGET, CheckReport, Outcome
from memcalc.errors import InputError, MemcalcError
from memcalc.estimation.estimate import estimate
from memcalc.importers.loading import load
from memcalc.ledger.result import Result
from memcalc.spec.cards import find_card


def check(paths: Iterable[str | os.PathLike[str]], gpu: str | None = None, budget: int | None = None) -> CheckReport:
    """Size every configuration under `paths`.

    Args:
        paths: files, which are always checked, and folders, which are searched.
        gpu: the card to judge all by; default: each file's own `hardware.gpu`.
        budget: bytes that no GPU may exceed, card or not.

    Raises:
        InputError: the card is unknown. A broken file is an outcome, not an error: the others are still sized.
    """
    if gpu is not None:
        find_card(gpu)  # once for all, rather than once a file
    found = find_configs(paths)
    return CheckReport(tuple(_outcome(path, gpu, budget) for path in found.files), found.skipped, budget)


def _outcome(path: str, gpu: str | None, budget: int | None) -> Outcome:
    try:
        spec = load(path, gpu=gpu)
        if spec.hardware.gpu is None and budget is None:
            raise InputError(
                "no card and no budget to check against.",
                "Give --gpu CARD or --budget SIZE, or write hardware.gpu into the file.",
            )
        return _judged(path, estimate(spec), budget)
    except MemcalcError as error:
        return _broken(path, str(error))


def _broken(path: str, text: str) -> Outcome:
    """The message without the file's name and line, which the outcome holds itself."""
    name = re.escape(path), re.escape(Path(path).name)
    place = re.match(rf"(?:{'|'.join(name)})(?::(\d+))?: ", text)
    if place is None:
        return Outcome(path, "broken", message=text)
    return Outcome(path, "broken", message=text[place.end() :], line=int(place[1]) if place[1] else None)


def _judged(path: str, result: Result, budget: int | None) -> Outcome:
    headline, card = result.headline, result.card
    numbers = {
        "device": headline.device_bytes,
        "reserved": headline.reserved_bytes,
        "allocated": result.ledger.peak_bytes,
    }
    basis, needed = next((name, size) for name, size in numbers.items() if size is not None)
    limits = [] if card is None else [(card.usable_bytes, f"usable on {card.label}")]
    if budget is not None:
        limits.append((budget, BUDGET))
    limit, words = min(limits)
    return Outcome(path, "fits" if needed <= limit else "does not fit", result, needed, basis, limit, words)
